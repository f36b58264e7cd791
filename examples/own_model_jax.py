"""A model of your own in plain JAX, with Federated Select: a client fetches the rows of its words only.

Clients have short posts, and the model says whether a post is about sport. The server holds a weight for each of
2,000 words; a client is sent, and trains, those of the words that it used. Run: python examples/own_model_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import partwise as pw
from partwise.data import by_client

NUM_CLIENTS, NUM_WORDS, WORDS_IN_POST = 500, 2_000, 8


def generate_posts(seed: int = 0) -> pw.ClientStore:
    """Every client has 20 posts about its own few topics; some words speak for sport and some against it."""
    rng = np.random.default_rng(seed)
    leaning = rng.normal(0, 1, NUM_WORDS)
    client = np.repeat(np.arange(NUM_CLIENTS), 20)
    popularity = 1 / (10 + np.arange(NUM_WORDS))
    own = rng.choice(NUM_WORDS, (NUM_CLIENTS, 40), p=popularity / popularity.sum())  # each client's words
    word = own[client[:, None], rng.integers(0, 40, (len(client), WORDS_IN_POST))]
    sport = (leaning[word].sum(axis=1) > 0).astype(np.int32)
    return pw.ClientStore.from_arrays(client, ids=["word"], word=word, sport=sport)


def logistic_regression(num_words: int) -> pw.Model:
    def init(rng: jax.Array) -> dict:
        return {"word": jnp.zeros(num_words), "bias": jnp.zeros(())}

    def predict(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
        return params["word"][batch["word"]].sum(axis=1) + params["bias"]  # [examples]

    def loss(scores: jax.Array, batch: dict) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(scores, batch["sport"])  # one value for each example

    right = pw.Metric(lambda scores, batch: (scores > 0) == batch["sport"], higher_is_better=True)
    return pw.Model(init, predict, loss, {"accuracy": right})


if __name__ == "__main__":
    store = generate_posts()
    model = logistic_regression(store.num_keys("word"))
    roles = pw.partition(model, {"word": pw.keyed("word")})  # the bias has no rule, so it is shared
    setting = pw.Setting(model, roles, ("word", "sport"))
    task = pw.Task(
        "posts", *by_client(store), personal=setting, stateful=setting
    )  # nothing is local: both the same
    run = pw.train(
        task,
        algorithm="fed_select",
        rounds=150,
        cohort__size=30,
        update__rate=1.0,
        server__optimizer="adagrad",
        server__rate=0.3,
        simulation__lanes=8,
    )
    print(f"accuracy on unseen clients: {run.test['accuracy']:.2f}")
    whole = 4 * (store.num_keys("word") + 1)
    print(
        f"sent to a client in a round: {run.summary['bytes_down_per_client']:.0f} of the model's {whole:,} bytes"
    )
