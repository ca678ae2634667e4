"""docs/families.md is what the table of families gives, and every family has a model that the tests try."""

from pathlib import Path

from families_page import PAIR_STAGES, STAGES, families_page
from tiny_decoders import DECODERS
from tiny_encoder_decoders import FAMILIES

from graphport.model_def.encoder_decoder_family import ENCODER_DECODER_FAMILIES
from graphport.model_def.huggingface_config import DECODER_FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs/families.md"


def test_every_family_is_tried_in_every_stage() -> None:
    tried = [decoder.model_type for decoder in DECODERS.values()]
    assert list(dict.fromkeys(family.model_type for family in DECODER_FAMILIES)) == list(dict.fromkeys(tried))
    assert [family.model_type for family in ENCODER_DECODER_FAMILIES] == list(FAMILIES)
    rows = [line for line in families_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(DECODERS) + len(FAMILIES)
    assert all(row.count("| yes ") == len(STAGES) for row in rows[: len(DECODERS)])
    assert all(row.count("| yes ") == len(PAIR_STAGES) for row in rows[len(DECODERS) :])


def test_the_page_is_what_the_table_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == families_page(), "docs/families.md is old: run `make families`"
