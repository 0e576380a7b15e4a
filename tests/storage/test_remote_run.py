"""A run whose workdir is in a bucket."""

from etils import epath

from interdomain_jax.evaluation.records import read_records
from interdomain_jax.training.metrics import read_metrics
from tests.storage.bucket import local_bucket
from tests.training.test_processes import run


def test_train_resume_and_evaluate(tmp_path, cache, monkeypatch):
    run(1, tmp_path / "local", cache=cache, evaluates=True)
    with local_bucket() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        workdir = epath.Path(bucket.url) / "runs" / "first"
        run(1, workdir, cache=cache)
        assert sorted(path.name for path in workdir.iterdir()) == [
            "checkpoints",
            "config.json",
            "loss_curve.png",
            "metrics.jsonl",
            "tensorboard",
        ]
        (damaged,) = (workdir / "checkpoints" / "6" / "run").glob("metadata*")
        damaged.write_text(damaged.read_text()[:-10])
        (output,) = run(1, workdir, cache=cache, evaluates=True)
        assert "checkpoint 6 is damaged" in output
        assert "steps 4 to 6" in output
        assert (workdir / "damaged_checkpoint_6" / "params" / "_METADATA").exists()

        losses = [[row.get("train/loss") for row in read_metrics(path)] for path in (workdir, tmp_path / "local")]
        assert losses[0] == losses[1]
        (record,), (expected,) = read_records(workdir), read_records(tmp_path / "local")
        assert (record.settings, record.measurements) == (expected.settings, expected.measurements)
        assert (workdir / "evaluations" / "perplexity.png").read_bytes().startswith(b"\x89PNG")
