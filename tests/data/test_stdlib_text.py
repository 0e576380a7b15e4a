"""The default corpus against the files it is made from."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from interdomain_jax.data import stdlib_text
from interdomain_jax.data.loader import open_corpus

PREPARE_OFFLINE = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was called")

socket.socket.connect = refuse
socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse

from interdomain_jax.data import loader, tokenizers

source = loader.open_corpus("stdlib_text", "train", sys.argv[1])
batches = loader.train_iterator(
    source, tokenizers.load_tokenizer("bytes"), sequence_length=64, batch_size=2, seed=0
)
next(batches)
assert "tensorflow" not in sys.modules
"""


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


def kept_paths(files: dict[str, bytes]) -> list[str]:
    modules = sorted(path for path in files if path.startswith("package/module_"))
    return [*modules, "readme.txt", "notes.md", "a.rst"]


def test_a_tree_of_files_comes_back_exactly(tmp_path, files):
    config = stdlib_text.config_for(tree_of(tmp_path / "library", files))
    builder = stdlib_text.prepare(str(tmp_path / "corpora"), config)
    found = {}
    for split in ("train", "validation"):
        documents = stdlib_text.open_split(builder, split)
        paths = []
        for index in range(len(documents)):
            document = documents[index]
            assert set(document) == {"text", "path"}
            assert document["text"].encode() == files[document["path"]]
            assert expected_split(document["path"]) == split
            paths.append(document["path"])
        assert paths == sorted(paths)
        found[split] = paths
    assert sorted(found["train"] + found["validation"]) == sorted(kept_paths(files))


def test_skipped_files_are_counted_in_the_log(tmp_path, files, caplog):
    caplog.set_level("INFO", logger="absl")
    config = stdlib_text.config_for(tree_of(tmp_path / "library", files))
    stdlib_text.prepare(str(tmp_path / "corpora"), config)
    lines = [record.getMessage() for record in caplog.records]
    train = next(line for line in lines if line.startswith("Prepared stdlib_text train:"))
    paths = [path for path in kept_paths(files) if expected_split(path) == "train"]
    size = sum(len(files[path]) for path in paths)
    assert f"train: {len(paths)} documents, {size} bytes;" in train
    assert "1 files that are not UTF-8 and 1 that are empty" in train


def test_another_process_prepares_the_same_corpus_first(tmp_path, files, monkeypatch):
    config = stdlib_text.config_for(tree_of(tmp_path / "library", files))
    data_dir = tmp_path / "corpora"
    list_files = stdlib_text.text_files
    others = []

    def prepared_by_another_meanwhile(root):
        monkeypatch.setattr(stdlib_text, "text_files", list_files)
        others.append(stdlib_text.prepare(str(data_dir), config))
        return list_files(root)

    monkeypatch.setattr(stdlib_text, "text_files", prepared_by_another_meanwhile)
    builder = stdlib_text.prepare(str(data_dir), config)

    (other,) = others
    assert builder is not other
    assert builder.data_path == other.data_path
    assert len(stdlib_text.open_split(builder, "train")) > 100
    assert list(data_dir.glob("**/incomplete*")) == []


def test_a_failure_while_preparing_leaves_nothing_behind(tmp_path, files, monkeypatch):
    config = stdlib_text.config_for(tree_of(tmp_path / "library", files))

    def fail(self, split, paths):
        raise OSError("disk on fire")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(stdlib_text.StdlibText, "_generate_examples", fail)
        with pytest.raises(OSError, match="disk on fire"):
            stdlib_text.prepare(str(tmp_path / "corpora"), config)
    builder = stdlib_text.prepare(str(tmp_path / "corpora"), config)
    assert len(stdlib_text.open_split(builder, "train")) > 100


def test_the_name_tells_libraries_apart(tmp_path):
    one = stdlib_text.config_for(tree_of(tmp_path / "one", {"a.py": b"1"}))
    same = stdlib_text.config_for(tree_of(tmp_path / "same", {"a.py": b"2", "b.bin": b""}))
    more = stdlib_text.config_for(tree_of(tmp_path / "more", {"a.py": b"1", "b.py": b"1"}))
    longer = stdlib_text.config_for(tree_of(tmp_path / "longer", {"a.py": b"12"}))
    assert one.name == same.name
    assert len({one.name, more.name, longer.name}) == 3
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert one.name.startswith(f"{sys.implementation.name}-{version}")


def test_a_tree_without_a_validation_file(tmp_path):
    config = stdlib_text.config_for(tree_of(tmp_path / "library", {"a.py": b"1", "b.py": b"2"}))
    with pytest.raises(ValueError, match="has no file for the validation split: of its 2 text"):
        stdlib_text.prepare(str(tmp_path / "corpora"), config)


def test_the_standard_library_offline_without_tensorflow_and_in_silence(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PREPARE_OFFLINE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    root = Path(sysconfig.get_paths()["stdlib"])
    for split in ("train", "validation"):
        documents = open_corpus("stdlib_text", split, str(tmp_path))
        paths = {documents[index]["path"] for index in range(len(documents))}
        assert len(paths) == len(documents) > 10
        assert {expected_split(path) for path in paths} == {split}
        assert all(
            documents[i]["text"].encode() == (root / documents[i]["path"]).read_bytes()
            for i in range(0, len(documents), 20)
        )
        assert ("json/decoder.py" in paths) == (expected_split("json/decoder.py") == split)

    with pytest.raises(ValueError, match=r"split 'test' does not exist.* train, validation"):
        open_corpus("stdlib_text", "test", str(tmp_path))
    tenth = open_corpus("stdlib_text", "train[:10%]", str(tmp_path))
    whole = open_corpus("stdlib_text", "train", str(tmp_path))
    assert len(tenth) == round(len(whole) / 10)
    assert tenth[0] == whole[0]
