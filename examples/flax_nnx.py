"""A Flax NNX module whose normalisation is each client's own (FedBN). Needs: pip install 'partwise[flax]'

Writers have digits of their own hand. The layers are shared; batch normalisation, statistics and scales, is local
and starts from a default that all learn together. Run: python examples/flax_nnx.py
"""

import jax
import optax
from flax import nnx

import partwise as pw
from partwise.data import by_client, generate_writers


class MLP(nnx.Module):
    def __init__(self, units: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(784, units, rngs=rngs)
        self.norm = nnx.BatchNorm(units, rngs=rngs)
        self.out = nnx.Linear(units, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def loss(scores: jax.Array, batch: dict) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])  # [examples]


if __name__ == "__main__":
    store = generate_writers(num_clients=100, median=40, num_classes=10)  # columns pixels and label
    right = pw.Metric(lambda scores, batch: scores.argmax(-1) == batch["label"], higher_is_better=True)
    model = pw.nnx(
        lambda rngs: MLP(32, rngs=rngs),
        loss,
        {"accuracy": right},
        inputs=lambda batch: batch["pixels"].reshape(-1, 784) / 255,
    )
    roles = pw.partition(model, {"norm/*": pw.local("learned")})
    for leaf in roles.describe():
        print(f"{leaf.path:16} {leaf.role}")
    task = pw.Task("digits", *by_client(store), pw.Setting(model, roles, ("pixels", "label")))
    run = pw.train(task, rounds=30, cohort__size=20, update__rate=0.1, simulation__lanes=10)
    print(f"accuracy on unseen clients: {run.test['accuracy']:.2f}")
