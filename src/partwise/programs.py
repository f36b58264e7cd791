"""How the programs are compiled whose numbers reach a model, a metric or a prediction.

On a CPU, XLA cuts large operations into as many parts as the process has cores while it compiles, and what it cuts
otherwise is rounded otherwise. The last digits would then depend on the cores that the process is bound to, or on
those of the process that left the program in the cache. So this pass is off in every program that is made here.

On an NVIDIA GPU a loop can be recorded once, as a CUDA graph, and started as one. Otherwise the host reads the
condition of a loop after every turn, and for small models that takes longer than the turn itself. XLA leaves this
off. Recorded loops whose condition is more than a comparison of two integers never end (jaxlib 0.11.2), so a
program that has one is compiled without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

ANY_CORES = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # no pass of GPUs has this name
ON_CPU = ANY_CORES | {"xla_cpu_prefer_vector_width": 512}  # the widest vectors; XLA's default is half of them
RECORDED = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"
}
INTEGER = re.compile(r"tensor<u?i(8|16|32|64)>")


def jit(function: Callable[..., Any], **more: Any) -> Any:
    """`jax.jit` for a function whose numbers do not depend on how many cores there are. A function that it returns
    cannot be called inside of another jitted one."""
    return jax.jit(function, compiler_options=ANY_CORES, **more)


def jit_program(function: Callable[..., Any], donate_argnums: Sequence[int] = ()) -> Any:
    """`jit` for a function with long loops over small arrays."""
    made = lambda options: jax.jit(function, donate_argnums=donate_argnums, compiler_options=options)
    backend = jax.default_backend()
    return made(ON_CPU) if backend == "cpu" else _RecordedLoops(made) if backend == "gpu" else made(None)


class _RecordedLoops:
    """A jitted function whose loops are recorded if they can be, which is known when it is first called."""

    def __init__(self, jit: Callable[[Any], Any]):
        self._plain, self._recorded, self._chosen = jit(None), jit(RECORDED), None

    def __call__(self, *given: Any) -> Any:
        if self._chosen is None:
            program = self._plain.lower(*given).compiler_ir()
            can = only_counts(program.operation) and _is_known()
            self._chosen = self._recorded if can else self._plain
        return self._chosen(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen or self._plain, name)


def _is_known() -> bool:
    """Whether this XLA takes the option, for a GPU on which it was tried."""
    if "rocm" in jax.devices()[0].client.platform_version.lower():
        return False
    try:
        jax.jit(jnp.negative, compiler_options=RECORDED).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def only_counts(program: Any) -> bool:
    """Whether all loops in a lowered program (an operation of MLIR) end when an integer has reached another. A
    traced program would not do: JAX lowers some draws and functions to loops of their own."""
    return all(map(_counts, _loops(program)))


def _counts(loop: Any) -> bool:
    condition = [each.operation for each in loop.regions[0].blocks[0]]
    compared = [each for each in condition if each.name not in ("stablehlo.constant", "stablehlo.return")]
    return [each.name for each in compared] == ["stablehlo.compare"] and all(
        INTEGER.fullmatch(str(value.type)) for value in compared[0].operands
    )


def _loops(operation: Any) -> Iterator[Any]:
    """Every loop in an operation, also in others."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.while":
                    yield inner.operation
                yield from _loops(inner.operation)
