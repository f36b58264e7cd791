"""A Keras 3 recommender: user tables local, film tables keyed. Needs: pip install 'partwise[keras]'

A client is one user, so its user tables have one row. It is sent the rows of the films that it rated.
Run: python examples/keras_model.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax.numpy as jnp
import keras
from keras import layers

import partwise as pw
from partwise.data import by_client, planted_ratings

NUM_FILMS = 60


def recommender(num_films: int, dim: int = 4) -> keras.Model:
    """A function, because clients work on slices: it is called again for other numbers of films."""
    user = keras.Input((), dtype="int32", name="user")
    film = keras.Input((), dtype="int32", name="film")
    match = layers.Dot(axes=1)(
        [
            layers.Embedding(1, dim, name="user_vector")(user),
            layers.Embedding(num_films, dim, name="film_vector")(film),
        ]
    )
    return keras.Model(
        [user, film], layers.Add()([match, layers.Embedding(num_films, 1, name="film_bias")(film)])
    )


def error(outputs, batch):
    return jnp.square(outputs[:, 0] - batch["rating"])  # [examples]


if __name__ == "__main__":
    store = planted_ratings(num_clients=200, num_items=NUM_FILMS, rank=4, noise=0.3).store.rename(
        {"item": "film"}
    )
    model = pw.keras(
        recommender,
        error,
        {"rmse": pw.Metric(error, finish=lambda mean: mean**0.5)},
        rows={"num_films": NUM_FILMS},
        inputs=lambda batch: [jnp.zeros_like(batch["film"]), batch["film"]],
    )
    roles = pw.partition(model, {"user_*": pw.local("learned"), "film_*": pw.keyed("film")})
    task = pw.Task("films", *by_client(store), pw.Setting(model, roles, ("film", "rating")))
    run = pw.train(task, rounds=100, server__optimizer="adagrad", server__rate=0.3, simulation__lanes=10)
    print(f"rmse on unseen clients: {run.test['rmse']:.2f}")
