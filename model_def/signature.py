"""Names, shapes and dtypes of a graph's inputs and outputs, and the manifest that travels with a bundle.

In: a configuration. Out: `Signature`, `Manifest` and their JSON. The only place that knows these names; it reads
no graph and opens no session.

Symbolic dimensions: `batch` rows, `sequence` new tokens a row (of an encoder: the longest row's), `capacity` tokens the
cache has room for, `window_capacity` those that it has room for in layers that keep no more than their window, `rows`
hidden states asked for, `height` and `width` of images in pixels.
"""

import dataclasses
import json
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from graphport.model_def.audio_config import num_frames
from graphport.model_def.config import TransformerConfig
from graphport.model_def.forced_tokens import ForcedTokens
from graphport.model_def.window_rows import WindowRows, rows_of

Kind = Literal["decoder", "encoder", "image_encoder", "encoder_decoder", "recurrent_decoder"]
KIND_WORDS: dict[Kind, str] = {
    "decoder": "a decoder",
    "encoder": "an encoder",
    "image_encoder": "an image encoder",
    "encoder_decoder": "an encoder-decoder",
    "recurrent_decoder": "a recurrent decoder",
}
DType = Literal["float32", "float16", "bfloat16", "float8e4m3fn", "int64", "int32", "int8", "uint8"]

MANIFEST_FORMAT = 1
TOWERS_KIND = "two_towers"  # what a manifest says that joins two bundles (see `towers.py`)

MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
ENCODER_GRAPH_FILE = "encoder.onnx"  # of an encoder-decoder; its model.onnx is the decoder
ENCODER_WEIGHTS_FILE = "encoder.onnx.data"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # the texts of the special tokens, for chat templates
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FUSIONS_FILE = "fusions.json"
CERTIFICATE_FILE = "certificate.json"
BARE_GRAPH_FILE = "bare_graph.onnx"  # the graph without the minima of its blocks: what the runtime packs, never runs
PREPARED_FOLDER = "prepared"  # the graph packed for one processor: made on the machine that runs it
PREPARED_FILE = "prepared.json"
TUNING_FILE = "tuning.json"  # how the bundle is fastest on one machine: made on the machine that runs it

INPUT_IDS = "input_ids"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
WINDOW_SEQLENS_K = "window_seqlens_k"
WINDOW_TOTAL_SEQUENCE_LENGTH = "window_total_sequence_length"
LOGITS_ROWS = "logits_rows"
LOGITS = "logits"
TOP_LOGITS = "top_logits"
TOP_IDS = "top_ids"
LOG_TOTAL = "log_total"
GREEDY_IDS = "greedy_ids"
NEXT_SEQLENS_K = "next_seqlens_k"
LENGTHS = "lengths"
TOKEN_TYPE_IDS = "token_type_ids"
CONDITIONING = "conditioning"
HIDDEN_STATES = "hidden_states"
EMBEDDINGS = "embeddings"
PIXEL_VALUES = "pixel_values"
INPUT_FEATURES = "input_features"
SOURCE_LENGTHS = "source_lengths"
SOURCE_CAPACITY_STEP = 64  # tokens by which room for sources grows: attention to a source costs what the room is

CAPACITY, WINDOW_CAPACITY = "capacity", "window_capacity"

NUM_CANDIDATES = 64  # of a row, at most: what comes to the host when an id is sampled


# A matrix of 4- or 8-bit blocks in the graph: `<name>_q4` or `_q8`, and beside it, by suffix in place of that:
SCALES, ZERO_POINTS, MINIMA, MINIMA_TRANSPOSED = "_scales", "_zero_points", "_minima", "_minima_transposed"


class ManifestError(ValueError):
    """A manifest that is missing, torn, newer than this version or of another kind."""


def past_key(layer: int) -> str:
    """Input name of layer `layer`'s key cache before the step."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Input name of layer `layer`'s value cache before the step."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """Output name of layer `layer`'s key cache after the step (the same buffer as the input)."""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """Output name of layer `layer`'s value cache after the step (the same buffer as the input)."""
    return f"present.{layer}.value"


def source_key(layer: int) -> str:
    """Name of the source's keys for layer `layer`: an output of the encoder's graph, an input of the decoder's."""
    return f"source.{layer}.key"


def source_value(layer: int) -> str:
    """Name of the source's values for layer `layer`."""
    return f"source.{layer}.value"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One graph input or output; a `str` in `shape` is a symbolic dimension."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Inputs and outputs of a graph, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def decoder_signature(
    config: TransformerConfig,
    cache_dtype: DType = "float32",
    *,
    samples: bool = False,
    window_layers: tuple[int, ...] = (),
) -> Signature:
    """Inputs and outputs of a decoder step.

    `input_ids` int64 [batch, sequence]; `seqlens_k` int32 [batch], tokens of the row after the step minus one;
    `total_sequence_length` int32 scalar, an upper bound of the rows' lengths after the step, equal to `sequence`
    exactly when nothing is cached yet; `logits_rows` int64 [rows], indices into the flattened [batch * sequence]
    hidden states; caches [batch, kv_heads, capacity, head_dim], or half of head_dim in uint8, which holds two 4-bit
    values a byte. `logits` float32 [rows, vocab]. With `samples` the outputs end with those of `sample_outputs`.
    With an encoder the inputs end with `source_lengths` int32 [batch] and keys and values [batch, heads, source,
    head_dim] of each layer, in the type of a float cache.
    (The contract of ONNX Runtime's GroupQueryAttention with a static cache.)

    The caches of `window_layers` hold a row's newest tokens alone, the oldest of them first, and the graph has
    `window_seqlens_k` and `window_total_sequence_length`: the same two counts, of the tokens that these caches hold
    after the step. Positions are those of the text all the same, from `seqlens_k`.
    """
    inputs = [
        TensorSpec(name=INPUT_IDS, dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name=SEQLENS_K, dtype="int32", shape=("batch",)),
        TensorSpec(name=TOTAL_SEQUENCE_LENGTH, dtype="int32", shape=()),
        TensorSpec(name=LOGITS_ROWS, dtype="int64", shape=("rows",)),
    ]
    if window_layers:
        inputs.append(TensorSpec(name=WINDOW_SEQLENS_K, dtype="int32", shape=("batch",)))
        inputs.append(TensorSpec(name=WINDOW_TOTAL_SEQUENCE_LENGTH, dtype="int32", shape=()))
    outputs = [TensorSpec(name=LOGITS, dtype="float32", shape=("rows", config.vocab_size))]
    for layer, block in enumerate(config.blocks):
        width = block.attention.head_dim // (2 if cache_dtype == "uint8" else 1)
        capacity = WINDOW_CAPACITY if layer in window_layers else CAPACITY
        shape = ("batch", block.attention.num_kv_heads, capacity, width)
        for name in (past_key(layer), past_value(layer)):
            inputs.append(TensorSpec(name=name, dtype=cache_dtype, shape=shape))
        for name in (present_key(layer), present_value(layer)):
            outputs.append(TensorSpec(name=name, dtype=cache_dtype, shape=shape))
    if config.encoder is not None:
        inputs.append(TensorSpec(name=SOURCE_LENGTHS, dtype="int32", shape=("batch",)))
        inputs += source_specs(config, cache_dtype)
    if samples:
        outputs += sample_outputs(config)
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs))


def unmoved_windows(names: Container[str], seqlens_k: Any, total: Any) -> dict[str, Any]:  # noqa: ANN401 - arrays
    """What a graph with inputs `names` is told of layers with a window whose caches hold all tokens, if it asks."""
    if WINDOW_SEQLENS_K not in names:
        return {}
    return {WINDOW_SEQLENS_K: seqlens_k, WINDOW_TOTAL_SEQUENCE_LENGTH: total}


def sample_outputs(config: TransformerConfig) -> tuple[TensorSpec, ...]:
    """Outputs of a graph that reduces each row of its logits, so that the host need not fetch the row.

    `greedy_ids` int64 [rows, 1], the lowest id of the highest logit; `log_total` float32 [rows], the logarithm of the
    sum of exp(logit - highest logit), not finite exactly when no id can be chosen; `top_logits` float32 and `top_ids`
    int64 [rows, K], the K = min(64, vocab) highest in descending order; `next_seqlens_k` int32 [batch], the lengths
    of the step that follows if each row goes on with its greedy id. A length of 0 stays 0 there: rows that only fill a
    batch up keep overwriting their first token, at the cost of one token.
    """
    count = min(NUM_CANDIDATES, config.vocab_size)
    return (
        TensorSpec(name=GREEDY_IDS, dtype="int64", shape=("rows", 1)),
        TensorSpec(name=LOG_TOTAL, dtype="float32", shape=("rows",)),
        TensorSpec(name=TOP_LOGITS, dtype="float32", shape=("rows", count)),
        TensorSpec(name=TOP_IDS, dtype="int64", shape=("rows", count)),
        TensorSpec(name=NEXT_SEQLENS_K, dtype="int32", shape=("batch",)),
    )


def source_specs(config: TransformerConfig, dtype: DType) -> list[TensorSpec]:
    """Keys and values of the source for each layer, [batch, heads, source, head_dim]."""
    specs = []
    for layer, block in enumerate(config.blocks):
        assert block.cross_attention is not None
        shape = ("batch", block.cross_attention.num_heads, "source", block.cross_attention.head_dim)
        specs += [TensorSpec(name=name, dtype=dtype, shape=shape) for name in (source_key(layer), source_value(layer))]
    return specs


def source_signature(config: TransformerConfig, dtype: DType = "float32") -> Signature:
    """Inputs and outputs of the encoder's graph of an encoder-decoder.

    `input_ids` int64 [batch, source]; `lengths` int32 [batch], the real tokens of each row, which come first; outputs
    as the decoder's inputs of these names, unspecified beyond a row's length. Of recordings `input_features` float32
    [batch, mel bands, frames] alone, all frames real.
    """
    audio = None if config.encoder is None else config.encoder.audio
    if config.encoder is not None and audio is not None:
        positions = config.encoder.max_positions
        shape = ("batch", audio.mel_bins, num_frames(positions))
        whole = [
            dataclasses.replace(spec, shape=(spec.shape[0], spec.shape[1], positions, spec.shape[3]))
            for spec in source_specs(config, dtype)
        ]
        features = TensorSpec(name=INPUT_FEATURES, dtype="float32", shape=shape)
        return Signature(inputs=(features,), outputs=tuple(whole))
    ids = TensorSpec(name=INPUT_IDS, dtype="int64", shape=("batch", "source"))
    lengths = TensorSpec(name=LENGTHS, dtype="int32", shape=("batch",))
    return Signature(inputs=(ids, lengths), outputs=tuple(source_specs(config, dtype)))


def encoder_signature(config: TransformerConfig) -> Signature:
    """Inputs and outputs of an encoder.

    `input_ids` int64 [batch, sequence]; `lengths` int32 [batch], the real tokens of each row, which come first (padding
    before or between them cannot be said); `token_type_ids` int64 [batch, sequence] where the model has several types;
    `conditioning` float32 [batch, hidden] of a conditioned one.
    `hidden_states` float32 [batch, sequence, hidden], unspecified beyond a row's length; `embeddings` float32
    [batch, dimension] where it pools, not normalised; `logits` float32 [batch, labels], or [batch, sequence, labels] of
    each token, where it classifies. With a masked head `logits_rows` int64 [rows], indices into the flattened
    [batch * sequence] hidden states, and `logits` float32 [rows, vocab].
    """
    inputs = [
        TensorSpec(name=INPUT_IDS, dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name=LENGTHS, dtype="int32", shape=("batch",)),
    ]
    if config.token_types > 1:
        inputs.append(TensorSpec(name=TOKEN_TYPE_IDS, dtype="int64", shape=("batch", "sequence")))
    width = config.hidden_size
    if config.conditioned:
        inputs.append(TensorSpec(name=CONDITIONING, dtype="float32", shape=("batch", width)))
    outputs = [TensorSpec(name=HIDDEN_STATES, dtype="float32", shape=("batch", "sequence", width))]
    if config.pooling is not None:
        outputs.append(
            TensorSpec(name=EMBEDDINGS, dtype="float32", shape=("batch", config.pooling.vector_width(width)))
        )
    if config.classifier is not None:
        tokens = ("sequence",) if config.classifier.per_token else ()
        shape = ("batch", *tokens, len(config.classifier.labels))
        outputs.append(TensorSpec(name=LOGITS, dtype="float32", shape=shape))
    if config.masked_head is not None:
        inputs.append(TensorSpec(name=LOGITS_ROWS, dtype="int64", shape=("rows",)))
        outputs.append(TensorSpec(name=LOGITS, dtype="float32", shape=("rows", config.vocab_size)))
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs))


def image_signature(config: TransformerConfig) -> Signature:
    """Inputs and outputs of an image encoder.

    `pixel_values` float32 [batch, channels, height, width], height and width numbers where they are fixed;
    `hidden_states` float32 [batch, sequence, hidden], class tokens before patches row by row; `embeddings` float32
    [batch, dimension], not normalised, or `logits` float32 [batch, labels], where they are read out.
    """
    image = config.image
    assert image is not None
    size = image.fixed_size or ("height", "width")
    tokens = image.num_tokens(*image.fixed_size) if image.fixed_size else "sequence"
    pixels = TensorSpec(name=PIXEL_VALUES, dtype="float32", shape=("batch", image.channels, *size))
    outputs = [TensorSpec(name=HIDDEN_STATES, dtype="float32", shape=("batch", tokens, config.hidden_size))]
    if image.readout is not None:
        name, width = LOGITS if image.readout.labels else EMBEDDINGS, image.readout.vector_width(config.hidden_size)
        outputs.append(TensorSpec(name=name, dtype="float32", shape=("batch", width)))
    return Signature(inputs=(pixels,), outputs=tuple(outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size in bytes and SHA-256 (hex) of one file of a bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint says about starting and ending text.

    `eos_token_ids` is the union over generation config, tokenizer and config. `forced` is an encoder-decoder's.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    forced: ForcedTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle is: everything the runtime needs besides the graph, weights and tokenizer files.

    `max_length` is the longest total length (prompt + new tokens; of an encoder: the longest text) the graph can serve.
    `source` describes where the weights came from (format, name, SHA-256).
    """

    graphport_version: str
    kind: Kind
    target: str
    precision: str
    max_length: int
    config: TransformerConfig
    signature: Signature
    generation: GenerationDefaults
    source: dict[str, str]
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        plain = dataclasses.asdict(self)
        plain["config"] = self.config.to_dict()
        return json.dumps({"format": MANIFEST_FORMAT, **plain}, indent=1)

    @property
    def samples_on_device(self) -> bool:
        """Whether the graph reduces its logits to candidates (`sample_outputs`)."""
        return any(spec.name == GREEDY_IDS for spec in self.signature.outputs)

    @property
    def cache_dtype(self) -> DType | None:
        """Element type of the KV cache buffers; None for an encoder, which has none."""
        return next((spec.dtype for spec in self.signature.inputs if spec.name == past_key(0)), None)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers whose caches hold no more than their window (see `decoder_signature`)."""
        moving = {spec.name for spec in self.signature.inputs if WINDOW_CAPACITY in spec.shape}
        return tuple(layer for layer in range(self.config.num_layers) if past_key(layer) in moving)

    @property
    def window_rows(self) -> WindowRows | None:
        """What the caches of `window_layers` hold; None where every cache holds all tokens."""
        return rows_of(self.config, self.window_layers)


def read_manifest(folder: Path) -> Manifest:
    """Read `folder/manifest.json`.

    Raises ManifestError when the folder is no bundle, the file is torn, or its format is not this version's.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ManifestError(
            f"{folder} is no graphport bundle: it has no {MANIFEST_FILE}; make one with `graphport export`"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        written = data.pop("format")
        if written != MANIFEST_FORMAT:
            raise ManifestError(
                f"{path} has format {written}, this graphport reads {MANIFEST_FORMAT}; export the bundle again"
            )
        if data.get("kind") == TOWERS_KIND:
            raise ManifestError(
                f"{folder} holds two bundles, of texts and of images; give {folder}/text or {folder}/images"
            )
        return _manifest(data)
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged ({error}); export the bundle again") from error


def _manifest(data: dict[str, Any]) -> Manifest:
    signature = data.pop("signature")
    generation = data.pop("generation")
    generation["eos_token_ids"] = tuple(generation["eos_token_ids"])
    if generation.get("forced") is not None:
        generation["forced"] = ForcedTokens.from_dict(generation["forced"])
    manifest = Manifest(
        config=TransformerConfig.from_dict(data.pop("config")),
        signature=Signature(inputs=_specs(signature["inputs"]), outputs=_specs(signature["outputs"])),
        generation=GenerationDefaults(**generation),
        files={name: FileRecord(**record) for name, record in data.pop("files").items()},
        **data,
    )
    _require_plausible(manifest)
    return manifest


def _specs(specs: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=spec["name"], dtype=spec["dtype"], shape=tuple(spec["shape"])) for spec in specs)


def _require_plausible(manifest: Manifest) -> None:
    """Raise ValueError for values that no export writes: the runtime takes its limits and shapes from them."""
    config, generation = manifest.config, manifest.generation
    texts = {"graphport_version": manifest.graphport_version, "target": manifest.target}
    for name, text in (texts | {"precision": manifest.precision} | manifest.source).items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be text, got {text!r}")
    if manifest.kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {manifest.kind!r}")
    if (manifest.kind == "encoder_decoder") != (config.encoder is not None):
        raise ValueError(
            f"kind is {manifest.kind}, but the configuration has {'no' if config.encoder is None else 'an'} encoder"
        )
    if (manifest.kind in ("decoder", "encoder_decoder")) != config.is_decoder:
        raise ValueError(
            f"kind is {manifest.kind}, but the configuration is {'' if config.is_decoder else 'not '}a decoder's"
        )
    if (manifest.kind == "recurrent_decoder") != config.is_recurrent:
        attention = "linear" if config.is_recurrent else "no linear"
        raise ValueError(f"kind is {manifest.kind}, but the configuration has {attention} attention")
    if (manifest.kind == "image_encoder") != (config.image is not None):
        reads = "no images" if config.image is None else "images"
        raise ValueError(f"kind is {manifest.kind}, but the configuration reads {reads}")
    if not _is_count(manifest.max_length) or not 1 <= manifest.max_length <= config.max_positions:
        raise ValueError(
            f"max_length must be a whole number from 1 to max_positions ({config.max_positions}), "
            f"got {manifest.max_length!r}"
        )
    _require_ids(generation)
    for name, record in manifest.files.items():
        if not _is_count(record.size) or not isinstance(record.sha256, str):
            raise ValueError(f"the record of {name} must be a size and a hash, got {record.size!r}, {record.sha256!r}")
    dtypes = get_args(DType)
    for spec in (*manifest.signature.inputs, *manifest.signature.outputs):
        if spec.dtype not in dtypes:
            raise ValueError(f"the dtype of {spec.name} must be one of {', '.join(dtypes)}, got {spec.dtype!r}")


def _require_ids(generation: GenerationDefaults) -> None:
    others = [value for value in (generation.bos_token_id, generation.pad_token_id) if value is not None]
    for value in (*generation.eos_token_ids, *others):
        if not _is_count(value):
            raise ValueError(f"token ids must be whole numbers from 0, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
