"""Open a decoder's bundle for use, as tuned and as certified.

In: a bundle folder and how to run it. Out: a `LanguageModel`. What it cannot hold to is refused before it is returned.
"""

import os
from collections import abc

from graphport.model_def.flags import require_flags, require_optional_flags
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.certified_bundle import require_certified, require_same_surroundings
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import GraphWish
from graphport.runtime.device import DeviceWish, PrefillProducts
from graphport.runtime.language_model import DECODER_BATCH, LanguageModel
from graphport.runtime.tuning import prompt_phase, tuned_choice


def load_language_model(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: abc.Mapping[str, OptionValue] | None = None,
    max_batch: int = DECODER_BATCH,
    max_length: int | None = None,
    threads: int | None = None,
    prefill_chunk: int | None = None,
    prefix_cache_bytes: int = 0,
    prompt_lookup: bool = False,
    draft: str | os.PathLike[str] | None = None,
    cuda_graphs: GraphWish = "auto",
    stream: int | None = None,
    spinning: bool | None = None,
    prepared: bool | None = None,
    prefill_products: PrefillProducts | None = None,
    tuned: bool = True,
    strict: bool = False,
) -> LanguageModel:
    """Open a decoder's bundle.

    device_id: which CUDA device. provider_options: of ONNX Runtime's CUDA provider, for example {"use_tf32": "1"}.
    max_batch: prompts that run together; more are queued. max_length: longest prompt + new tokens, at most and by
    default the bundle's. threads: of the CPU, by default one a core. prefill_chunk: prompt tokens a step, a bound of
    the workspace and of how long running rows wait for a new prompt; by default 64 for a bundle for the CPU, 512 for
    CUDA. prefix_cache_bytes: host memory for rows of earlier prompts, which later ones that begin alike use again; none
    by default. prompt_lookup, draft: where drafts of the next tokens come from, the text so far or a smaller bundle
    with the same token ids; results are those without. cuda_graphs, on CUDA alone: decode steps are captured and
    replayed; "auto" does without, and logs it, where ONNX Runtime cannot capture the graph. stream: the cudaStream_t to
    run on, by default one of the session's own that is ordered with the legacy default stream. spinning: idle threads
    of the CPU wait in busy loops, which answers sooner and takes processors from others; by default they do. prepared:
    on the CPU, take the graph that `prepare` packed for this processor, by default if there is one. prefill_products:
    "float32" runs steps of 96 and more prompt tokens in a second session, whose 4-bit matrices multiply activations as
    they are, prefill_chunk then being 128 by default; by default "as_exported". tuned: what `tune` measured on this
    machine, if it did, is the default of threads, spinning, prefill_products, prefill_chunk and prepared. strict:
    refuse prefill_products="float32", changed bytes, a bundle without certificate, and a provider or ONNX Runtime other
    than certified; the graph runs as it was certified, not as packed for this processor, and nothing is taken from
    `tune`. Raises ManifestError, CertificateError, DeviceError, NotEnoughMemoryError, and ValueError, also for an
    encoder's bundle.
    """
    require_flags(tuned=tuned, strict=strict)
    require_optional_flags(spinning=spinning, prepared=prepared)
    files = open_bundle(bundle)
    if strict and prefill_products == "float32":
        raise ValueError(
            f"{files.folder}: strict=True runs a bundle as it was certified, and prefill_products='float32' computes "
            "prompts otherwise; leave one of them out"
        )
    certificate = require_certified(files) if strict else None
    choice = tuned_choice(files, device=device) if tuned and not strict else None
    if choice is not None:
        threads = choice.threads if threads is None else threads
        spinning = choice.spinning if spinning is None else spinning
        prepared = choice.packed if prepared is None else prepared
    products, prefill_chunk = prompt_phase(
        choice, products=prefill_products, chunk=prefill_chunk, max_length=max_length
    )
    lm = LanguageModel(
        files,
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=max_batch,
        max_length=max_length,
        threads=threads,
        prefill_chunk=prefill_chunk,
        prefix_cache_bytes=prefix_cache_bytes,
        prompt_lookup=prompt_lookup,
        draft=draft,
        cuda_graphs=cuda_graphs,
        stream=stream,
        spinning=spinning is not False,
        prepared=prepared is not False and not strict,
        prefill_products=products,
    )
    try:
        if prepared and not lm.is_prepared:
            raise ValueError(
                f"prepared=True was asked for, and {files.folder} has no packed graph for this machine (the log says "
                f"why); run `graphport prepare {files.folder}`, or leave prepared out"
            )
        if certificate is not None:
            require_same_surroundings(certificate, files.folder, lm.device)
    except ValueError:
        lm.close()
        raise
    return lm
