"""The default corpus against the files it is made from."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from interdomain_jax.data.documents import documents_of
from interdomain_jax.data.sources import make_source
from interdomain_jax.data.stdlib_text import StdlibText, config_for
from tests.network import network_raises

PREPARE_OFFLINE = (
    network_raises("AssertionError")
    + """
import sys
from interdomain_jax.data.sources import make_source

source = make_source("stdlib_text", data_dir=sys.argv[1])
source.write_texts()
assert "tensorflow" not in sys.modules
"""
)


def expected_split(path: str) -> str:
    number = int(hashlib.sha256(path.encode()).hexdigest()[:16], base=16)
    return "train" if number % 50 else "validation"


def tree_of(root: Path, files: dict[str, bytes]) -> str:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return str(root)


@pytest.fixture
def files() -> dict[str, bytes]:
    """Two hundred small modules, and every kind of file that is left out."""
    kept = {f"package/module_{i:03}.py": f"value = {i}\n".encode() for i in range(200)}
    left_out = {
        "latin.py": b"# caf\xe9\n",
        "package/__init__.py": b"",
        "site-packages/other.py": b"x = 1\n",
        "dist-packages/other.py": b"x = 1\n",
        "package/__pycache__/module_000.py": b"x = 1\n",
        "grammar.pickle": b"\x80\x04",
        "data.csv": b"1,2\n",
    }
    kept |= {
        "readme.txt": b"line\r\nline\x00\n",
        "notes.md": b"\xef\xbb\xbfbom \xc3\xa9",
        "a.rst": b".",
    }
    return kept | left_out


def source_of(root: Path, data_dir: Path | str = "unused") -> StdlibText:
    return StdlibText(config=config_for(str(root)), data_dir=str(data_dir))


def kept_paths(files: dict[str, bytes]) -> list[str]:
    modules = sorted(path for path in files if path.startswith("package/module_"))
    return [*modules, "readme.txt", "notes.md", "a.rst"]


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
def test_every_file_is_in_one_part_and_one_split(tmp_path, files, part_bytes):
    source = source_of(tree_of(tmp_path, files))
    parts = source.parts(part_bytes)
    paths = [path for part in parts for path in part.files]
    assert paths == sorted([*kept_paths(files), "latin.py", "package/__init__.py"])
    assert len(parts) == {1: len(paths) - 1, 1 << 20: 1}.get(part_bytes, len(parts)) > 0
    found = {}
    for split in ("train", "validation"):
        texts = [text for part in parts for text in source.texts(part, split)]
        assert {expected_split(text.key) for text in texts} == {split}
        assert [text.key for text in texts] == sorted(text.key for text in texts)
        found |= {text.key: text.content for text in texts}
    assert found == {path: files[path] for path in paths}


def test_the_dataset_has_the_documents_of_each_file(tmp_path, files):
    source = source_of(tree_of(tmp_path / "library", files), tmp_path / "corpora")
    source.write_texts()
    found = {}
    for split in ("train", "validation"):
        records = list(source.as_data_source(split))
        paths = [record["path"].decode() for record in records]
        assert paths == sorted(paths)
        assert {expected_split(path) for path in paths} == {split}
        found |= {path: record["text"].decode() for path, record in zip(paths, records, strict=True)}
    assert found == {path: documents_of(files[path]).texts[0] for path in kept_paths(files)}


def test_skipped_files_are_counted_in_the_log(tmp_path, files, caplog):
    caplog.set_level("INFO", logger="absl")
    source_of(tree_of(tmp_path / "library", files), tmp_path / "corpora").write_texts()
    lines = [record.getMessage() for record in caplog.records]
    (train,) = [line for line in lines if line.startswith("Wrote stdlib_text train:")]
    texts = [documents_of(files[path]).texts[0] for path in kept_paths(files) if expected_split(path) == "train"]
    size = sum(len(text.encode()) for text in texts)
    assert f"train: {len(texts)} documents, {size} bytes; skipped 2 texts, 1 empty, 1 invalid utf-8." in train


def test_another_process_writes_the_same_dataset_first(tmp_path, files, monkeypatch):
    root, data_dir = tree_of(tmp_path / "library", files), tmp_path / "corpora"
    parts = StdlibText.parts
    others = []

    def written_by_another_meanwhile(self, part_bytes):
        monkeypatch.setattr(StdlibText, "parts", parts)
        others.append(source_of(root, data_dir))
        others[0].write_texts()
        return parts(self, part_bytes)

    monkeypatch.setattr(StdlibText, "parts", written_by_another_meanwhile)
    source = source_of(root, data_dir)
    source.write_texts()

    (other,) = others
    assert source.data_path == other.data_path
    assert list(source.as_data_source("train")) == list(other.as_data_source("train"))
    assert list(data_dir.glob("**/incomplete*")) == []
    again = source_of(root, data_dir)
    monkeypatch.setattr(StdlibText, "parts", None)
    again.write_texts()
    assert len(again.as_data_source("train")) > 100


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path, files, monkeypatch):
    source = source_of(tree_of(tmp_path / "library", files), tmp_path / "corpora")

    def fail(self, part):
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setattr(StdlibText, "read", fail)
        with pytest.raises(OSError, match="disk on fire"):
            source.write_texts()
    source.write_texts()
    assert len(source.as_data_source("train")) > 100


def test_the_name_tells_libraries_apart(tmp_path):
    one = config_for(tree_of(tmp_path / "one", {"a.py": b"1"}))
    same = config_for(tree_of(tmp_path / "same", {"a.py": b"2", "b.bin": b""}))
    more = config_for(tree_of(tmp_path / "more", {"a.py": b"1", "b.py": b"1"}))
    longer = config_for(tree_of(tmp_path / "longer", {"a.py": b"12"}))
    other_rule = config_for(str(tmp_path / "one"), validation_one_in=3)
    assert one.name == same.name
    assert len({config.name for config in (one, more, longer, other_rule)}) == 4
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert one.name.startswith(f"{sys.implementation.name}-{version}")


def test_a_tree_without_a_validation_file(tmp_path):
    source = source_of(tree_of(tmp_path / "library", {"a.py": b"1", "b.py": b"2"}), tmp_path / "corpora")
    with pytest.raises(
        ValueError, match=r"has no text for the validation split\. A text is .* of its path, .* of 50\."
    ):
        source.write_texts()


def test_the_standard_library_offline_without_tensorflow_and_in_silence(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PREPARE_OFFLINE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    root = Path(sysconfig.get_paths()["stdlib"])
    source = make_source("stdlib_text", data_dir=str(tmp_path))
    for split in ("train", "validation"):
        records = source.as_data_source(split)
        texts = {record["path"].decode(): record["text"].decode() for record in records}
        assert len(texts) == len(records) > 10
        assert {expected_split(path) for path in texts} == {split}
        some = sorted(texts)[::20]
        assert all((texts[path],) == documents_of((root / path).read_bytes()).texts for path in some)
        assert ("json/decoder.py" in texts) == (expected_split("json/decoder.py") == split)
