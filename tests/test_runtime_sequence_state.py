"""States of sequences outside the engine: used again, rewound, saved and read back, or refused."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, tiny_weights, write_tiny_bundle
from tiny_requests import greedy, num_steps, random_ids

import graphport
from graphport.runtime import LanguageModel, SequenceState, load
from graphport.runtime.sequence_state import STATE_FORMAT

TOLERANCE = TOLERANCES["reused cache", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("states") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1, prefill_chunk=8)


@pytest.fixture
def saved(model: LanguageModel, tmp_path: Path) -> Path:
    model.prefill(random_ids(20)).save(tmp_path / "state.npz")
    return tmp_path / "state.npz"


@pytest.mark.parametrize("end", ["limit", "end id", "stop string"])
def test_b100_a_turn_that_goes_on_from_a_state_equals_a_one_shot_run(model: LanguageModel, end: str) -> None:
    prompt = random_ids(5)
    (free,) = model.generate([prompt], greedy(12))
    options = {"limit": {}, "end id": {"stop_token_ids": [free.token_ids[6]]}, "stop string": {"stop": free.text[2:5]}}
    (first,) = model.generate([prompt], greedy(12, **options[end]), keep_state=True)
    assert first.state is not None
    ids = [*prompt, *first.token_ids]
    assert list(first.state.token_ids) == ids[:-1]  # the last one has been chosen, not run
    conversation = [*ids, *random_ids(4, 9)]
    before = num_steps(model)
    (second,) = model.generate([conversation], greedy(5), state=first.state)
    assert num_steps(model) - before == 5  # one chunk, from which the first id comes, and four
    assert second == model.generate([conversation], greedy(5))[0]


def test_a_state_is_there_though_another_thread_runs_the_last_step(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model._engine
    assert engine is not None
    hand_over, has_last_token = engine.reuse.hand_over, threading.Event()

    def slowly(*arguments: Any) -> None:
        has_last_token.set()  # and not the rows
        time.sleep(0.2)
        hand_over(*arguments)

    monkeypatch.setattr(engine.reuse, "hand_over", slowly)
    request = model.request(random_ids(5), greedy(1), keep_state=True)
    other = threading.Thread(target=model._turns.run, args=([request],))
    other.start()
    assert has_last_token.wait(30)
    model._turns.run([request])
    assert request.sequences[0].kept_rows is not None
    other.join()


@pytest.mark.parametrize("length", [0, 1, 19, 20])
def test_b101_a_rewound_state_goes_on_as_a_fresh_prompt_does(model: LanguageModel, length: int) -> None:
    ids = random_ids(20)
    state = model.prefill(ids).rewind(length)
    assert state.token_ids == tuple(ids[:length])
    prompt = [*ids[:length], *random_ids(6, 4)]
    expected = model.prefill(prompt)
    got = model.prefill(prompt, state=state)
    assert got.token_ids == expected.token_ids == tuple(prompt)
    for mine, theirs in zip(got.rows, expected.rows, strict=True):
        assert np.abs(mine - theirs).max() < TOLERANCE
    assert model.generate([prompt], greedy(), state=state) == model.generate([prompt], greedy())


@pytest.mark.parametrize("length", [-1, 21])
def test_b101_rewinding_beyond_the_state_is_refused(model: LanguageModel, length: int) -> None:
    with pytest.raises(ValueError, match=f"cannot rewind to {length} tokens: the state has 20, give 0 to 20"):
        model.prefill(random_ids(20)).rewind(length)


@pytest.mark.parametrize("length", ["3", 1.5, True])
def test_rewinding_to_what_is_no_number_of_tokens_is_refused(model: LanguageModel, length: Any) -> None:
    with pytest.raises(TypeError, match=f"rewind takes a whole number of tokens, 0 to 20; got {length!r}"):
        model.prefill(random_ids(20)).rewind(length)


def test_one_state_serves_any_number_of_requests_at_once(model: LanguageModel) -> None:
    shared = random_ids(30)
    state = model.prefill(shared)
    prompts = [[*shared, *random_ids(1 + seed, seed)] for seed in range(6)]
    before = [rows.tobytes() for rows in state.rows]
    assert model.generate(prompts, greedy(), state=state) == model.generate(prompts, greedy())
    assert [rows.tobytes() for rows in state.rows] == before
    assert state.num_bytes == 30 * 2 * 2 * 2 * 16 * 4


def test_a_state_whose_ids_are_not_the_prompts_spares_what_they_share(model: LanguageModel) -> None:
    ids = random_ids(20)
    state = model.prefill(ids)
    for prompt in ([*ids[:9], (ids[9] + 1) % VOCAB, *ids[10:]], ids[:7], ids, [1]):
        assert model.generate([prompt], greedy(), state=state) == model.generate([prompt], greedy())


def test_a_request_that_never_ran_has_no_state(model: LanguageModel) -> None:
    (output,) = model.generate([[1]], greedy(5), keep_state=True, timeout=1e-9)
    assert output.state is None
    (output,) = model.generate([[1]], greedy(5))
    assert output.state is None


def test_every_sample_has_its_own_state(model: LanguageModel) -> None:
    params = dataclasses.replace(greedy(6), temperature=1.5, seed=1, n=3)
    (output,) = model.generate([random_ids(9)], params, keep_state=True)
    for sample in output.samples:
        assert sample.state is not None
        assert sample.state.token_ids == (*sample.prompt_token_ids, *sample.token_ids[:-1])
        assert sample.state.num_prompt_tokens == 9


def test_a_saved_state_is_the_same_in_another_process_object(bundle: TinyBundle, saved: Path) -> None:
    with load(bundle.folder, threads=1, prefill_chunk=64) as other:
        state = other.restore(saved)
        prompt = [*random_ids(20), *random_ids(5, 1)]
        assert state.token_ids == tuple(random_ids(20))
        before = num_steps(other)
        (output,) = other.generate([prompt], greedy(), state=state)
        assert num_steps(other) - before == 8
        assert output == other.generate([prompt], greedy())[0]
        assert other.restore(saved).rewind(7).token_ids == tuple(random_ids(20)[:7])


def test_a_torn_or_changed_file_is_refused_wherever_it_is_cut(model: LanguageModel, saved: Path) -> None:
    whole = saved.read_bytes()
    cuts = [whole[:size] for size in (0, 1, 100, len(whole) // 2, len(whole) - 1)]
    flips = []
    for place in np.linspace(30, len(whole) - 30, 40).astype(int):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        flips.append(bytes(changed))
    expected, refused = model.restore(saved), 0
    for data in (*cuts, *flips):
        saved.write_bytes(data)
        try:
            state = model.restore(saved)
        except ValueError:
            refused += 1
            continue
        # a bit that nothing reads, such as a time in zip's own directory
        assert state.token_ids == expected.token_ids
        assert [rows.tobytes() for rows in state.rows] == [rows.tobytes() for rows in expected.rows]
    assert refused > 40
    saved.write_bytes(cuts[3])
    with pytest.raises(ValueError, match=r"state.npz is no saved state, or it is torn \(.*\); save it again"):
        model.restore(saved)


def test_foreign_files_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "other"
    with pytest.raises(FileNotFoundError):
        model.restore(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="is no saved state, or it is torn"):
        model.restore(path)
    for arrays in ({"a": np.zeros(3)}, {"header": np.frombuffer(b"[]", np.uint8)}):
        with path.open("wb") as file:
            np.savez(file, **arrays)
        with pytest.raises(ValueError, match="is no saved state, or it is torn"):
            model.restore(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", b"0" * 1000)
    with pytest.raises(ValueError, match=r"its member header.npy is compressed"):
        model.restore(path)


def _rewritten(path: Path, change: Any) -> None:
    """The file with its header, and its arrays, changed."""
    with np.load(path) as members:
        arrays = dict(members)
    header = json.loads(arrays["header"].tobytes())
    change(header, arrays)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h, _: h.update(format=STATE_FORMAT + 1), "has format 4, this version reads 3; save it again"),
        (lambda h, _: h["model"].update(precision="int4"), "its precision is 'int4', this one's 'fp32'"),
        (lambda h, _: h["model"].update(cache_dtype="int8"), "its cache_dtype is 'int8', this one's 'float32'"),
        (
            lambda h, _: h["model"].update(graphport_version="9"),
            f"version is '9', this one's '{graphport.__version__}'",
        ),
        (lambda h, _: h["model"].update(weights="0"), "is of another model: its weights is '0'"),
        (lambda h, _: h.pop("model"), r"is no saved state \('model'\)"),
        (lambda _, a: a.update(token_ids=a["token_ids"][:-1]), "holds arrays that are not this model's"),
        (lambda _, a: a.update(token_ids=a["token_ids"] + VOCAB), "holds arrays that are not this model's"),
        (lambda _, a: a.update(rows_1=a["rows_1"].astype(np.float16)), "holds arrays that are not this model's"),
        (lambda h, _: h.update(num_prompt_tokens=21), "holds arrays that are not this model's"),
        (lambda _, a: a.pop("rows_3"), "rows_3"),
    ],
)
def test_files_of_another_kind_of_model_or_version_are_refused_by_name(
    model: LanguageModel, saved: Path, change: Any, match: str
) -> None:
    _rewritten(saved, change)
    with pytest.raises(ValueError, match=match):
        model.restore(saved)


def test_a_state_of_another_model_is_refused_before_anything_runs(
    model: LanguageModel, saved: Path, tmp_path: Path
) -> None:
    other_bundle = write_tiny_bundle(tmp_path / "other", weights=tiny_weights(1))
    with load(other_bundle.folder, threads=1) as other:
        with pytest.raises(ValueError, match=r"state.npz is of another model: its weights is"):
            other.restore(saved)
        for call in (other.generate, other.prefill):
            with pytest.raises(ValueError, match="state is of another model: its weights is"):
                call([[1]] if call == other.generate else [1], state=model.restore(saved))  # type: ignore[operator]
        assert num_steps(other) == 0
    with pytest.raises(TypeError, match="state must be a SequenceState or None; got str"):
        model.generate([[1]], state=str(saved))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep_state must be True or False; got 1"):
        model.generate([[1]], keep_state=1)  # type: ignore[arg-type]


def test_a_save_that_fails_leaves_what_was_there_and_nothing_beside_it(
    model: LanguageModel, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    for error in (OSError("no space left on device"), KeyboardInterrupt()):

        def fail(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", fail)
            with pytest.raises(type(error)):
                model.prefill([1, 2]).save(saved)
        assert saved.read_bytes() == before
        assert list(saved.parent.iterdir()) == [saved]
    with pytest.raises(FileNotFoundError):
        model.prefill([1, 2]).save(saved.parent / "no folder" / "state")


SAVE_FOR_EVER = """
import resource, sys
import numpy as np
from graphport.runtime.sequence_state import ModelIdentity, SequenceState
path, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
identity = ModelIdentity(
    graph="", weights="", precision="", cache_dtype="", graphport_version="", is_prepared=False,
    prefill_products="as_exported", chunk=0
)
count = 0
while True:
    count += 1
    rows = (np.full((2, 50_000, 8), count, np.float32),)
    SequenceState(token_ids=(count,) * 50_000, rows=rows, firsts=(0,), num_prompt_tokens=0, model=identity).save(path)
    print("saved", flush=True)
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(path), "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with np.load(path) as members:
        ids, rows = members["token_ids"], members["rows_0"]
    assert (ids == ids[0]).all()
    assert (rows == ids[0]).all()


def test_a_disk_that_is_full_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    finished = subprocess.run(
        [sys.executable, "-c", SAVE_FOR_EVER, str(path), "100000"], capture_output=True, text=True, check=False
    )
    assert finished.returncode != 0
    assert "OSError: [Errno 27] File too large" in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_state_does_not_compare_or_print_its_rows(model: LanguageModel) -> None:
    state = model.prefill([1, 2])
    assert isinstance(state, SequenceState)
    assert len(repr(state)) < 200
