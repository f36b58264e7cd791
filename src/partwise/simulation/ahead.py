"""Work ahead: a thread makes what will be asked for next, while the caller is busy with what it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    make: Callable[[Item], Result], items: Iterable[Item], depth: int = 1
) -> Generator[Result, None, None]:
    """`make(item)` for every item, in order, made by one thread.

    While the caller has a result, up to `depth` more are made, and no more are held. An error of `make` is raised
    when its result is asked for. If the iterator is closed, what is being made is waited for, and nothing else is
    made. With depth 0 there is no thread: results are made when they are asked for.
    """
    if not depth:
        yield from map(make, items)
        return
    rest, thread = iter(items), ThreadPoolExecutor(1, thread_name_prefix="partwise-ahead")
    try:
        coming = deque(thread.submit(make, item) for item in islice(rest, depth))
        while coming:
            result = coming.popleft().result()
            coming.extend(thread.submit(make, item) for item in islice(rest, 1))
            yield result
    finally:
        thread.shutdown(cancel_futures=True)
