"""What a comparison measured, and the figures that follow from it.

In: single runs, starts and divergences. Out: medians with their spread; JSON of everything measured. It measures
nothing itself (see `rounds.py`) and writes no table (see `comparison_report.py`).
"""

import json
import statistics
from dataclasses import asdict, dataclass, field

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed request to a warm process: `first_s` to the first new token, `rest_s` for the others.

    `others` is the share of the machine's CPU time that went to other processes meanwhile.
    """

    system: str
    prompt: int
    first_s: float
    rest_s: float
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One request to a fresh process, its files in the page cache.

    `load_s` is importing the library and opening the model, `answer_s` from starting the interpreter to the first new
    token; `peak_bytes` is the most resident memory (VmHWM), mapped files included.
    """

    system: str
    prompt: int
    load_s: float
    answer_s: float
    peak_bytes: int
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Distance to fp32 eager: mean KL divergence in nats, share of positions with the same best token."""

    kl: float
    top1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCost:
    """What it takes to make a bundle: seconds and bytes of a whole export, of which reading the source's weights."""

    export_s: float
    peak_bytes: int
    read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A system: what it is, what it opened, how large that is on disk, how close it comes to fp32 eager."""

    versions: dict[str, str]
    model: str
    disk_bytes: int
    fidelity: Fidelity | None = None
    cost: ExportCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median between the smallest and the largest of its repeats."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that one command measured. `facts` has the systems in order: bundles, peers, the reference last.

    `clock` is "wall", or "cpu" where all times are CPU time of one thread.
    """

    title: str
    date: str
    machine: str
    commit: str
    command: str
    threads: int
    clock: str
    new_tokens: int
    fidelity_tokens: int
    max_others: float
    redone: int
    reference: str
    bundles: tuple[str, ...]
    facts: dict[str, Facts]
    runs: tuple[Run, ...] = field(default=())
    starts: tuple[Start, ...] = field(default=())

    @property
    def conditions(self) -> str:
        """Threads, and what the times are of."""
        return conditions(self.threads, self.clock)

    @property
    def prompts(self) -> list[int]:
        """Prompt lengths, ascending."""
        return sorted({run.prompt for run in self.runs})

    def prefill(self, system: str, prompt: int) -> Spread:
        """Tokens of the prompt a second, up to the first new token."""
        return spread([prompt / run.first_s for run in self._runs(system, prompt)])

    def decode(self, system: str, prompt: int) -> Spread:
        """New tokens a second after the first."""
        return spread([(self.new_tokens - 1) / run.rest_s for run in self._runs(system, prompt)])

    def first_token(self, system: str, prompt: int) -> Spread:
        """Seconds to the first new token."""
        return spread([run.first_s for run in self._runs(system, prompt)])

    def load(self, system: str) -> Spread:
        """Seconds to import the library and open the model."""
        return spread([start.load_s for start in self.starts if start.system == system])

    def answer(self, system: str, prompt: int) -> Spread:
        """Seconds from starting the interpreter to the first new token."""
        return spread([start.answer_s for start in self._starts(system, prompt)])

    def peak_bytes(self, system: str, prompt: int) -> Spread:
        """Most resident memory of a fresh process that answers one prompt."""
        return spread([start.peak_bytes for start in self._starts(system, prompt)])

    def to_json(self) -> str:
        """Every run and start, for other plots and tables than ours."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def _runs(self, system: str, prompt: int) -> list[Run]:
        return [run for run in self.runs if (run.system, run.prompt) == (system, prompt)]

    def _starts(self, system: str, prompt: int) -> list[Start]:
        return [start for start in self.starts if (start.system, start.prompt) == (system, prompt)]


def conditions(threads: int, clock: str) -> str:
    """Threads, and what the times are of."""
    return f"{threads} threads" if clock == "wall" else "1 thread, CPU time instead of wall time"


def spread(values: list[float]) -> Spread:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("nothing was measured here")
    return Spread(median=statistics.median(values), least=min(values), most=max(values))
