"""FineWeb-Edu from its files and from the hub, and sources without a network."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interdomain_jax.data import text_files
from interdomain_jax.data.sources import make_source
from interdomain_jax.errors import RunError
from tests.data.test_sources import expected_split, number_of
from tests.network import network_raises

FINEWEB_EDU_SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "id": pa.string(),
        "dump": pa.string(),
        "url": pa.string(),
        "file_path": pa.string(),
        "language": pa.string(),
        "language_score": pa.float64(),
        "token_count": pa.int64(),
        "score": pa.float64(),
        "int_score": pa.int64(),
    }
)

READ_OFFLINE = (
    network_raises("AssertionError")
    + """
import sys
from interdomain_jax.data.sources import make_source

corpus, files, data_dir = sys.argv[1:]
source = make_source(corpus, files=[files], validation_one_in=2, data_dir=data_dir)
source.write_texts()
texts = {split: source.as_data_source(split) for split in ("train", "validation")}
print(sum(len(records) for records in texts.values()))
assert "tensorflow" not in sys.modules
"""
)

DOWNLOAD_OFFLINE = (
    network_raises("OSError")
    + """
import time
from interdomain_jax.data.sources import make_source
from interdomain_jax.errors import RunError

time.sleep = lambda seconds: None  # The client tries again, and waits for long.

source = make_source("fineweb_edu/sample-10BT", data_dir="unused")
try:
    source.parts(1)
except RunError as error:
    print(error)
"""
)


def fineweb_edu_file(path: Path, texts: Sequence[str | None], row_group_size: int = 2) -> None:
    rows = [
        {
            "text": text,
            "id": f"<urn:uuid:{number}>",
            "dump": "CC-MAIN-2013-20",
            "url": f"https://example.org/{number}",
            "file_path": "s3://commoncrawl/segments/0.warc.gz",
            "language": "en",
            "language_score": 0.9,
            "token_count": 7,
            "score": 3.1,
            "int_score": 3,
        }
        for number, text in enumerate(texts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, FINEWEB_EDU_SCHEMA), path, row_group_size=row_group_size)


@pytest.mark.parametrize("corpus", ["text_files", "fineweb_edu/sample-10BT"])
def test_local_files_need_no_network(tmp_path, corpus):
    fineweb_edu_file(tmp_path / "a.parquet", [f"text {n}" for n in range(20)])
    arguments = [corpus, str(tmp_path / "*.parquet"), str(tmp_path / "corpora")]
    result = subprocess.run(
        [sys.executable, "-c", READ_OFFLINE, *arguments], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "20\n", "")


def test_fineweb_edu_from_its_files(tmp_path):
    files = {f"00{n}_00000.parquet": [f"text {n} {row}" for row in range(1000)] + [None] for n in range(2)}
    for name, texts in files.items():
        fineweb_edu_file(tmp_path / name, texts, row_group_size=100)
    source = make_source("fineweb_edu/sample-100BT", files=[str(tmp_path)], data_dir="unused")
    assert source.info.full_name.startswith("fineweb_edu/sample-100BT-")
    assert "a multiple of 1000." in source.split_rule
    found = {
        split: [text for part in source.parts(2000) for text in source.texts(part, split)]
        for split in ("train", "validation")
    }
    assert {expected_split(text, 1000) for text in found["validation"]} == {"validation"}
    texts = sorted(
        found["train"] + found["validation"], key=lambda text: (text.key.rpartition(":")[0], number_of(text))
    )
    read = [None if text.content is None else text.content.decode() for text in texts]
    assert read == [text for texts in files.values() for text in texts]
    other = make_source("fineweb_edu/sample-100BT", files=[str(tmp_path)], validation_one_in=7, data_dir="unused")
    assert "a multiple of 7." in other.split_rule


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Path]:
    """A directory laid out as the repository of FineWeb-Edu, in its place."""
    hub = tmp_path / "fineweb-edu"
    fineweb_edu_file(hub / "sample/10BT/000_00000.parquet", ["ten"])
    fineweb_edu_file(hub / "sample/10BT/001_00000.parquet", ["more"])
    fineweb_edu_file(hub / "data/CC-MAIN-2013-20/000_00000.parquet", ["all"])
    card = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
    (hub / "README.md").write_text(card)
    monkeypatch.setattr(text_files, "FINEWEB_EDU", str(hub))
    # Read when `datasets` is first imported: its cache is not to lie in the home directory.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return hub


@pytest.mark.parametrize(
    ("corpus", "subset", "expected"),
    [
        ("fineweb_edu", "sample-10BT", [b"ten", b"more"]),
        ("fineweb_edu/sample-10BT", "sample-10BT", [b"ten", b"more"]),
        ("fineweb_edu/default", "default", [b"all"]),
    ],
)
def test_fineweb_edu_from_the_hub(hub, corpus, subset, expected):
    source = make_source(corpus, data_dir="unused")
    assert source.info.full_name == f"fineweb_edu/{subset}/1.0.0"
    parts = source.parts(1)
    assert [text.content for part in parts for text in source.read(part)] == expected
    assert all(Path(path).is_relative_to(hub) for part in parts for path in part.files)


def test_the_hub_is_out_of_reach(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", DOWNLOAD_OFFLINE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"HF_HOME": str(tmp_path)},
    )
    (line,) = result.stdout.splitlines()
    assert line.startswith("HuggingFaceFW/fineweb-edu sample-10BT cannot be downloaded (")
    assert line.endswith("): give its parquet files, such as --files=/data/fineweb-edu/sample/10BT/*.parquet")


def test_another_setting_of_a_subset_that_is_downloaded(monkeypatch):
    def refuse(subset: str) -> list[str]:
        raise RunError(f"{subset} is not there")

    monkeypatch.setattr(text_files, "downloaded", refuse)
    source = make_source("fineweb_edu/default", validation_one_in=5, data_dir="unused")
    assert "a multiple of 5." in source.split_rule
    with pytest.raises(RunError, match="default is not there"):
        source.parts(1)
