"""Benchmarks: what a round costs, where the time goes, and how it grows."""

from partwise.bench.benchmarks import BENCHMARKS as BENCHMARKS
from partwise.bench.benchmarks import Benchmark as Benchmark
from partwise.bench.benchmarks import bench as bench
from partwise.bench.benchmarks import show_table as show_table
from partwise.bench.case import Case as Case
from partwise.bench.costs import measure_agent as measure_agent
from partwise.bench.costs import measure_polling as measure_polling
from partwise.bench.costs import measure_private_slices as measure_private_slices
from partwise.bench.costs import measure_processes as measure_processes
from partwise.bench.costs import measure_recommend as measure_recommend
from partwise.bench.costs import measure_sum as measure_sum
from partwise.bench.trainings import GENERATED as GENERATED
from partwise.bench.trainings import measure as measure
from partwise.bench.trainings import resolved as resolved
