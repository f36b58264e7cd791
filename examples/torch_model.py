"""A PyTorch module with a head for each client. Needs: pip install 'partwise[torch]' (see docs/torch.md)

The body is shared, the last layer local. Rounds are JAX programs: torchax runs the module's own code on JAX arrays.
Run: python examples/torch_model.py
"""

import optax
from torch import nn

import partwise as pw
from partwise.data import by_client, generate_writers


class Digits(nn.Module):
    def __init__(self, units: int = 32):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, units), nn.ReLU())
        self.head = nn.Linear(units, 10)

    def forward(self, x):
        return self.head(self.body(x))


def loss(scores, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        scores, batch["label"]
    )  # of JAX arrays, [examples]


if __name__ == "__main__":
    store = generate_writers(num_clients=100, median=40, num_classes=10)  # columns pixels and label
    right = pw.Metric(lambda scores, batch: scores.argmax(-1) == batch["label"], higher_is_better=True)
    model = pw.torch(Digits(), loss, {"accuracy": right}, inputs=lambda batch: batch["pixels"] / 255)
    roles = pw.partition(model, {"head/*": pw.local("learned")})
    task = pw.Task("digits", *by_client(store), pw.Setting(model, roles, ("pixels", "label")))
    run = pw.train(task, rounds=30, cohort__size=20, update__rate=0.1, simulation__lanes=10)
    print(f"accuracy on unseen clients: {run.test['accuracy']:.2f}")
