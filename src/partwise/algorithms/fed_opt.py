"""Adaptive Federated Optimization (Reddi et al., 2021), Algorithm 2: FedAvg with Adagrad, Adam or Yogi on the
server.

The negative mean update is the gradient for the server's optimizer (`server.step`). Every optimizer works
with every algorithm here (`server.optimizer`). The names in this file are those of the paper.
"""

from __future__ import annotations

from partwise.algorithms.fed_avg import FED_AVG

FED_ADAGRAD = FED_AVG._replace(
    summary="FedAdagrad: FedAvg with server.optimizer = adagrad (Reddi et al., 2021)",
    defaults={"server.optimizer": "adagrad", "server.rate": 0.1},
)
FED_ADAM = FED_AVG._replace(
    summary="FedAdam: FedAvg with server.optimizer = adam (Reddi et al., 2021)",
    defaults={"server.optimizer": "adam", "server.rate": 0.01},
)
FED_YOGI = FED_AVG._replace(
    summary="FedYogi: FedAvg with server.optimizer = yogi (Reddi et al., 2021)",
    defaults={"server.optimizer": "yogi", "server.rate": 0.01},
)
