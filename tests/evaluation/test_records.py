"""Records of evaluations: strict JSON, read as they were written."""

import json

import numpy as np
import pytest

from interdomain_jax.evaluation.records import FORMAT, Measurement, Record, read_records, record_path, write_record


def record(name, *measurements):
    return Record(
        format=FORMAT,
        kind="recall",
        name=name,
        model={"name": "tiny", "mixers": ["s4d"], "parameters": 10, "step": 3, "tokens": 6},
        command="python eval.py --workdir=runs/tiny",
        finished="2026-01-01T00:00:00+00:00",
        machine="1 CPU device(s)",
        versions={"commit": None},
        config={},
        settings={"seed": 0},
        measurements=measurements,
    )


def test_records_are_read_as_they_were_written(tmp_path):
    assert read_records(tmp_path) == []
    second = record("second", Measurement("needle", "accuracy", 0.5, 200, at=4096, error=0.03))
    first = record("first", Measurement("phonebook", "accuracy", 1.0, 3))
    for each in (second, first):
        write_record(tmp_path, each)
    assert read_records(tmp_path) == [first, second]
    write_record(tmp_path, second._replace(command="again"))
    assert [each.command for each in read_records(tmp_path)] == [first.command, "again"]


def test_a_record_is_strict_json(tmp_path):
    """lm-eval#934: NumPy integers and NaN in results files."""
    path = write_record(tmp_path, record("odd", Measurement("mqar", "loss", float("nan"), np.int64(3), at=np.int32(7))))
    content = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    (measurement,) = content["measurements"]
    assert (measurement["value"], measurement["samples"], measurement["at"]) == (None, 3, 7)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 0}'])
def test_what_is_no_record_is_refused(tmp_path, content):
    path = record_path(tmp_path, "broken")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match=r"broken\.json is"):
        read_records(tmp_path)
