"""The seconds that JAX spent compiling, so that they can be subtracted from a round's time."""

from __future__ import annotations

import jax

_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_seconds = 0.0


def _listen(event: str, duration_secs: float, **_: object) -> None:
    global _seconds
    if event in _EVENTS:
        _seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
    """Seconds of tracing and compiling since the start of the process."""
    return _seconds
