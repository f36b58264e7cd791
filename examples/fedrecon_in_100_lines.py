"""Federated Reconstruction (Singhal et al., 2021) from the data to one user's predictions, in 100 lines.

Users rate films. Nobody's ratings leave their device, and neither does what is learned about one user: the user's
vector is *local*. In every round some users are drawn; each rebuilds its vector from half of its ratings (the
support set), trains the films it rated on the other half (the query set), and sends the change of those films only.
A user who never took part does the same, once, to get predictions. Run: python examples/fedrecon_in_100_lines.py
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

import partwise as pw
from partwise.data import by_client

NUM_USERS, NUM_FILMS, DIM, NOISE = 600, 80, 4, 0.3


def generate_ratings(seed: int = 0) -> pw.ClientStore:
    """Ratings by a known law: user vector . film vector + noise. Every user rates 30 films."""
    rng = np.random.default_rng(seed)
    users, films = rng.normal(0, 0.7, (NUM_USERS, DIM)), rng.normal(0, 0.7, (NUM_FILMS, DIM))
    user = np.repeat(np.arange(NUM_USERS), 30)
    film = np.concatenate([rng.permutation(NUM_FILMS)[:30] for _ in range(NUM_USERS)])
    rating = 3.0 + np.sum(users[user] * films[film], axis=1) + rng.normal(0, NOISE, len(user))
    return pw.ClientStore.from_arrays(user, ids=["film"], film=film, rating=rating.astype(np.float32))


def init(rng: jax.Array) -> dict:
    """The parameters: a tree of arrays. `user` is one vector, because a client is one user."""
    user, film = jax.random.split(rng)
    return {
        "mean": jnp.asarray(3.0, jnp.float32),
        "user": 0.1 * jax.random.normal(user, (DIM,)),
        "film": 0.1 * jax.random.normal(film, (NUM_FILMS, DIM)),
    }


def predict(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
    """One predicted rating for every example of a batch: [examples]."""
    return params["mean"] + params["film"][batch["film"]] @ params["user"]


def squared_error(outputs: jax.Array, batch: dict) -> jax.Array:
    """The loss: one value for every example, never a mean."""
    return jnp.square(outputs - batch["rating"])


def make_task(store: pw.ClientStore) -> pw.Task:
    """The data, cut into training, validation and test users; the model; a role for every parameter."""
    model = pw.Model(init, predict, squared_error, {"rmse": pw.Metric(squared_error, finish=math.sqrt)})
    roles = {
        "mean": pw.shared(),  # sent to all, trained by all
        "film": pw.keyed("film"),  # a user is sent the rows of the films that it rated
        "user": pw.local(),  # never leaves the user
    }
    setting = pw.Setting(model, pw.partition(model, roles), columns=("film", "rating"))
    return pw.Task("films", *by_client(store), personal=setting)


def train(task: pw.Task) -> pw.Run:
    return pw.train(
        task,
        algorithm="fed_recon",
        rounds=200,
        cohort__size=40,  # users in a round
        split__kind="halves",  # the first half of a user's ratings is the support set
        reconstruct__rate=0.1,  # steps on the user's vector, the films held fixed
        reconstruct__epochs=10,
        update__rate=0.2,  # steps on the films, the user's vector held fixed
        server__optimizer="adagrad",
        server__rate=0.3,
        simulation__lanes=8,
    )


def ask_a_new_user(run: pw.Run, user: pw.ClientStore) -> None:
    """A test user knows more and more of its ratings, and predicts its last ten."""
    me, asked = run.personal, user.narrow(user.counts - 10, np.array([10]))
    for known in (1, 5, 20):
        vector = me.personalize(user.cap(known))  # rebuilt here, sent nowhere
        error = me.predict(vector, asked) - asked.gather().columns["rating"]
        print(f"a new user with {known:2} known ratings: RMSE {np.sqrt(np.mean(error**2)):.2f}")


if __name__ == "__main__":
    task = make_task(generate_ratings())
    run = train(task)
    print(f"users never seen in training: RMSE {run.test['rmse']:.3f} (noise alone: {NOISE})")
    print(f"a user was sent {run.summary['bytes_down_per_client']:,.0f} bytes a round")
    ask_a_new_user(run, task.test.take([0]))
