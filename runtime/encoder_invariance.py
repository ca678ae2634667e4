"""Whether an encoder's bundle gives a text or an image the same whatever surrounds it: `graphport verify --invariance`.

In: a checked bundle, what its certificate feeds. Out: named checks. Measured is the largest difference of a hidden
state or of what is read out, to the largest of them; where activations are rounded, 1 - cosine. It changes nothing on
disk.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certificate import Check
from graphport.model_def.certified_inputs import ImageInputs, Inputs, RowInputs
from graphport.model_def.encoder_runs import outputs_of
from graphport.model_def.seeded_conditions import seeded_conditions
from graphport.model_def.seeded_images import seeded_images
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import DeviceWish, default_threads
from graphport.runtime.encoder import ENCODER_BATCH, Encoder
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.image_encoder import IMAGE_BATCH, ImageEncoder
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.session import checked_threads

# Largest figure of a check. Beside each what all-MiniLM-L6-v2 measures.
SAME_KERNELS = 1e-5  # 0: the same rows, run another time
OTHER_SHAPES = 5e-5  # 4e-7 in fp32: sums in another order, because other rows run beside
ROUNDED = 1e-3  # 1 - cosine, with activations rounded to 8 bits or floats of 16: they round otherwise

Output = NDArray[np.float32]
Answer = list[Output]  # of one input: its hidden states, and what is read out


def check_encoder_invariance(
    bundle: BundleFiles,
    inputs: Inputs,
    *,
    device: DeviceWish = "auto",
    threads: int | None = None,
    observe: Callable[[str], None] = lambda _: None,
) -> tuple[Check, ...]:
    """Run `inputs` alone, then in other surroundings, and compare. Raises what opening the bundle raises."""
    return _Comparison(bundle, inputs, device=device, threads=threads, observe=observe).checks()


class _Comparison:
    """One bundle's inputs, how they are answered alone, and the checks that compare with that."""

    def __init__(
        self,
        bundle: BundleFiles,
        inputs: Inputs,
        *,
        device: DeviceWish,
        threads: int | None,
        observe: Callable[[str], None],
    ) -> None:
        self._bundle = bundle
        self._device: DeviceWish = device
        self._threads = default_threads() if threads is None else checked_threads(threads)
        self._observe = observe
        self._outputs = outputs_of(bundle.manifest.config)
        self._items = _items(bundle, inputs)
        self._is_rounded = bundle.manifest.precision != "fp32"

    def checks(self) -> tuple[Check, ...]:
        """All checks; sessions are opened anew where an earlier request could show."""
        session = self._session(self._threads)
        together = self._groups()
        alone = self._answers(session, [[index] for group in together for index in group])
        whole = self._answers(session, together)
        reverse = self._answers(session, [group[::-1] for group in together])
        pairs = [group[i : i + 2] for group in together for i in range(0, len(group), 2)]
        checks = [
            self._check("batch neighbours", "each alone, then all of a batch together", alone, whole),
            self._check("row order", "together, in order and in reverse", whole, reverse),
            self._check("batch size", "each alone, and two at a time", alone, self._answers(session, pairs)),
        ]
        if self._bundle.manifest.kind == "encoder":
            checks.append(self._padding(session, alone))
        again = self._answers(session, [[index] for group in together for index in group])
        checks.append(
            self._check("earlier requests", "on a model just opened, and after others", alone, again, exact=True)
        )
        others = [count for count in (1, 2, default_threads()) if count != self._threads]
        other = self._answers(self._session(others[0]), [[index] for group in together for index in group])
        words = f"{self._threads} and {others[0]} threads"
        checks.append(self._check("thread count", words, alone, other, exact=True))
        return (*checks, self._max_length())

    def _padding(self, session: EncoderSession, alone: dict[int, Answer]) -> Check:
        order = sorted(range(len(self._items)), key=lambda index: len(self._items[index]))
        short, long = order[0], order[-1]
        beside = self._answers(session, [[short, long]])
        words = f"{len(self._items[short])} tokens alone, and beside {len(self._items[long])}"
        return self._check("padding", words, {short: alone[short]}, {short: beside[short]})

    def _max_length(self) -> Check:
        """Through the class that serves: with nothing left over, and with the bundle's own longest input."""
        longest = max(self._num_tokens(item) for item in self._items)
        found = [self._served(length) for length in (self._bundle.manifest.max_length, longest)]
        wanted, other = ({i: [states] for i, states in enumerate(answers)} for answers in found)
        words = f"{self._bundle.manifest.max_length} and {longest}, with nothing left over"
        return self._check("max_length", words, wanted, other, exact=True)

    def _served(self, max_length: int) -> list[Output]:
        options: dict[str, Any] = {"device": self._device, "threads": self._threads, "max_length": max_length}
        if self._bundle.manifest.kind == "image_encoder":
            with ImageEncoder(self._bundle, max_batch=IMAGE_BATCH, **options) as images:
                return images.hidden_states(self._items)
        with Encoder(self._bundle, max_batch=ENCODER_BATCH, **options) as encoder:
            return encoder.hidden_states(self._items, conditioning=self._conditioning(self._items))

    def _num_tokens(self, item: Any) -> int:  # noqa: ANN401 - ids or pixels
        image = self._bundle.manifest.config.image
        return len(item) if image is None else image.num_tokens(*item.shape[1:])

    def _session(self, threads: int) -> EncoderSession:
        longest = max(self._num_tokens(item) for item in self._items)
        return EncoderSession(
            self._bundle,
            limits=RunLimits(max_batch=len(self._items), max_length=longest, prefill_chunk=longest),
            threads=threads,
            device=self._device,
            device_id=0,
            provider_options=None,
            stream=None,
        )

    def _groups(self) -> list[list[int]]:
        """Numbers of the inputs that can run together: texts all, images those of one size."""
        if self._bundle.manifest.kind == "encoder":
            return [list(range(len(self._items)))]
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, pixels in enumerate(self._items):
            groups.setdefault(pixels.shape, []).append(index)
        return list(groups.values())

    def _answers(self, session: EncoderSession, groups: Sequence[list[int]]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {index: [] for group in groups for index in group}
        for group in groups:
            for output in self._outputs:
                for index, found in zip(group, self._run(session, group, output), strict=True):
                    tokens = self._num_tokens(self._items[index])
                    answers[index].append(found[:tokens].copy() if found.ndim == 2 else found.copy())
        return answers

    def _run(self, session: EncoderSession, group: list[int], output: str) -> Output:
        items = [self._items[index] for index in group]
        if self._bundle.manifest.kind == "encoder":
            return session.run(items, output, conditioning=self._conditioning(items))
        return session.run_images(np.stack(items), output)

    def _conditioning(self, items: list[Any]) -> NDArray[np.float32] | None:
        """The vectors of texts, as in the certificate's runs; None where the model reads none."""
        config = self._bundle.manifest.config
        return seeded_conditions(items, config.hidden_size) if config.conditioned else None

    def _check(
        self, name: str, words: str, wanted: dict[int, Answer], found: dict[int, Answer], *, exact: bool = False
    ) -> Check:
        self._observe(f"invariance: {name}")
        pairs = [pair for index in wanted for pair in zip(wanted[index], found[index], strict=True)]
        by_angle = self._is_rounded and not exact
        limit = ROUNDED if by_angle else SAME_KERNELS if exact else OTHER_SHAPES
        measured = max((_angle if by_angle else _relative)(one, other) for one, other in pairs)
        return Check(
            name=f"invariance: {name}",
            measured=measured if np.isfinite(measured) else float("inf"),
            tolerance=limit,
            detail=f"{len(wanted)} inputs; {'1 - cosine' if by_angle else 'relative to the largest'}",
            inputs=words,
        )


def _items(bundle: BundleFiles, inputs: Inputs) -> list[Any]:
    """Ids of each text, or pixels of each image."""
    if isinstance(inputs, RowInputs):
        return [row.ids for row in inputs.rows]
    image = bundle.manifest.config.image
    assert isinstance(inputs, ImageInputs)
    assert image is not None
    batches = seeded_images(inputs.sizes, channels=image.channels, seed=inputs.seed)
    return [pixels for batch in batches for pixels in batch]


def _relative(wanted: Output, found: Output) -> float:
    scale = float(np.abs(wanted).max())
    gap = float(np.abs(wanted.astype(np.float64) - found).max())
    return gap / scale if scale else gap


def _angle(wanted: Output, found: Output) -> float:
    a, b = wanted.astype(np.float64).ravel(), found.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return max(1.0 - float(a @ b) / norms, 0.0) if norms else float(not np.array_equal(a, b))
