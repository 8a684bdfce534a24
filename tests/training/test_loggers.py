"""Dashboards of a run and the calls they get, with a stand-in for Weights & Biases."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch.loggers
import pytest

from trainer.common.errors import UserError
from trainer.config import RunConfig
from trainer.evaluation.outcomes import Result
from trainer.evaluation.results import Reach
from trainer.evaluation.statistics import estimate
from trainer.runs.parsing import merged, parse
from trainer.training import loggers
from trainer.training.loggers import (
    close,
    dashboard_name,
    has_wandb_key,
    kept_dashboards,
    log_table,
    logger_problems,
    other_loggers,
    wandb_id,
)


def configured(place, **logger):
    return parse(RunConfig, merged({"name": "demo", "run_dir": str(place)}, {"logger": logger}))


class WandbLogger:
    """Lightning's, which opens its run when that is asked for."""

    made: list[WandbLogger]
    reachable = True

    def __init__(self, **options):
        self.options, self.calls, self._wandb_init = options, [], {"anonymous": None, "id": 1}
        self.axes = {}
        self._experiment = options["experiment"]
        self.made.append(self)

    @property
    def experiment(self):
        if not self.reachable and self.options["mode"] != "offline":
            raise OSError("no way there\nat all")
        if self._experiment is None:
            offline = self.options["mode"] == "offline"
            place = Path("place", "offline-run", "files")
            self._experiment = SimpleNamespace(
                id=self.options["id"], dir=str(place), offline=offline, url="its page",
                name="run", finish=lambda: self.calls.append("finished"),
                define_metric=lambda name, **axis: self.axes.update({name: axis}),
            )  # fmt: skip
        return self._experiment

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))

    def log_table(self, *arguments):
        self.calls.append(arguments)

    log_image = log_table

    def finalize(self, status):
        self.calls.append(status)


@pytest.fixture
def made(monkeypatch):
    """The loggers that were made."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(lightning.pytorch.loggers, "WandbLogger", WandbLogger)
    monkeypatch.setattr(WandbLogger, "made", [], raising=False)
    return WandbLogger.made


def test_a_run_has_no_dashboard_by_itself(made, tmp_path):
    assert other_loggers(configured(tmp_path)) == made == []


def test_wandb_gets_the_names_of_the_run(made, tmp_path):
    settings = {"project": "needles", "entity": "team"}
    (logger,) = other_loggers(configured(tmp_path, wandb=True, **settings))
    options = dict(logger.options)
    wandb_settings = options.pop("settings")
    assert (wandb_settings.silent, wandb_settings.init_timeout) == (True, 30)
    assert options == {
        **{"name": "demo", "group": "demo", "id": wandb_id(tmp_path), "save_dir": str(tmp_path)},
        **{"resume": "allow", "mode": None, "experiment": None, "reinit": "create_new"},
        **settings,
    }
    assert logger._wandb_init == {"id": 1}


@pytest.mark.parametrize(("key", "offline"), [("a" * 40, True), ("", False)])
def test_wandb_is_offline_where_that_is_asked_for_or_no_key_is_there(
    made, tmp_path, monkeypatch, key, offline
):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (logger,) = other_loggers(configured(tmp_path, wandb=True, offline=offline))
    assert (logger.options["mode"], len(made)) == ("offline", 1)
    assert logger.options["id"] == wandb_id(tmp_path)


def test_an_unreachable_server_means_offline_logs_under_another_id(
    made, tmp_path, monkeypatch, caplog
):
    """Within one job there is no second attempt."""
    monkeypatch.setattr(WandbLogger, "reachable", False)
    config = configured(tmp_path, wandb=True)
    with kept_dashboards():
        (logger,) = other_loggers(config)
        assert (logger.options["mode"], logger.options["id"]) == (
            *("offline", f"{wandb_id(tmp_path)}-offline"),
        )
        assert len(made) == 2
        assert "(no way there)" in caplog.text
        run = logger.experiment
        close([logger])
        (again,) = other_loggers(config)
        assert len(made) == 3
        assert again.experiment is run
        assert logger.calls == ["success"]
    other_loggers(config)
    assert len(made) == 5  # it tries again


def test_one_attempt_is_made_for_a_run_and_its_controls(made, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(WandbLogger, "reachable", False)
    places = [tmp_path / "run", tmp_path / "run" / "controls" / "nope"]
    places[1].mkdir(parents=True)
    with kept_dashboards():
        for place in places:
            (logger,) = other_loggers(configured(place, wandb=True))
            assert logger.options["id"] == f"{wandb_id(place)}-offline"
        assert [logger.options["mode"] for logger in made] == [None, "offline", "offline"]
    (message,) = caplog.messages
    assert f"`wandb sync {places[0]}/wandb/offline-run-*` sends it" in message
    monkeypatch.setattr(WandbLogger, "reachable", True)
    with kept_dashboards():  # another command
        (logger,) = other_loggers(configured(places[0], wandb=True))
        assert logger.options["mode"] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_connects(made, tmp_path, monkeypatch, rank):
    monkeypatch.setattr(WandbLogger, "reachable", False)
    monkeypatch.setattr(loggers, "current_ranks", lambda: SimpleNamespace(is_rank_zero=rank == 0))
    other_loggers(configured(tmp_path, wandb=True))
    assert len(made) == 2 - rank


def test_a_run_is_finished_when_it_is_closed_or_with_the_last_that_follows(made, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = configured(tmp_path, wandb=True)
    (logger,) = other_loggers(config)
    close([logger])
    assert logger.calls == ["success", "finished"]
    assert "Weights & Biases, run: its page" in caplog.text
    with kept_dashboards():
        (first,) = other_loggers(config)
        close([first])
        assert first.calls == ["success"]
        (second,) = other_loggers(config)
        assert second.experiment is first.experiment
        close([second])
    assert first.calls == ["success", "finished"]
    offline = made[0].__class__(**{**logger.options, "mode": "offline", "experiment": None})
    _ = offline.experiment
    close([offline])
    assert "Weights & Biases, run: offline; wandb sync place/offline-run" in caplog.text
    begun_by_nobody = made[0].__class__(**{**logger.options, "experiment": None})
    close([begun_by_nobody])
    assert begun_by_nobody.calls == ["success"]


def test_a_dashboard_that_fails_at_its_end_stops_nothing(made, tmp_path, caplog):
    def refuse():
        raise ConnectionError("gone")

    with kept_dashboards():
        places = [tmp_path / "a", tmp_path / "b"]
        for place in places:
            place.mkdir()
            close([*other_loggers(configured(place, wandb=True))])
        for run in loggers._kept.values():
            run.finish = refuse
    assert caplog.text.count("Weights & Biases, run: not all was sent (gone)") == 2


def test_results_are_logged_by_length(made, tmp_path):
    results = [
        Result("RoPE", 128, 2.0, estimate([1.0, 0.0]), None),
        Result("RoPE", 64, 1.0, None, 4.0),
        Result("DroPE", 128, 2.0, estimate([1.0]), 3.0),
    ]
    reach = {"RoPE": (Reach(4, False, 64, (64,), (4.0,), (0.5,), (0, 64), (4.0,)),)}
    config = configured(tmp_path, wandb=True)
    log_table(config, results, reach, {"success": Path("success.png")})
    (logger,) = made
    assert logger.calls[:-2] == [
        (None, {"evaluation/length": 64, "evaluation/loss/RoPE": 4.0}),
        (
            None,
            {
                "evaluation/length": 128,
                "evaluation/retrieval/RoPE": 0.5,
                "evaluation/retrieval/DroPE": 1.0,
                "evaluation/loss/DroPE": 3.0,
            },
        ),
        (
            "length/history",
            ["arm", "step", "dropped", "length", "loss", "retrieval"],
            [["RoPE", 4, False, 64, 4.0, 0.5]],
        ),
        ("length/success", ["success.png"]),
    ]
    of_length = {"step_metric": "evaluation/length"}
    names = "retrieval/RoPE", "retrieval/DroPE", "loss/RoPE", "loss/DroPE"
    assert logger.axes == {f"evaluation/{name}": of_length for name in names}
    log_table(config, results)
    assert len(made[1].calls) == 2 + 2
    log_table(replace(config, logger=replace(config.logger, wandb=False)), results, reach)
    assert len(made) == 2


def test_a_control_is_called_after_its_run(tmp_path):
    assert dashboard_name(configured(tmp_path / "demo")) == "demo"
    assert dashboard_name(configured(tmp_path / "controls" / "nope")) == "demo/nope"


def test_an_id_is_drawn_once(tmp_path):
    first = wandb_id(tmp_path)
    assert len(bytes.fromhex(first)) == 4
    assert wandb_id(tmp_path) == first
    (tmp_path / "wandb_id").unlink()
    assert wandb_id(tmp_path) != first


def test_a_key_is_that_of_the_environment_or_of_the_server(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_wandb_key()
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password key\n")
    netrc.chmod(0o600)
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here.org:8080/api")
    assert not has_wandb_key()
    netrc.write_text("machine wandb.here.org login user password key\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "nonsense")
    assert not has_wandb_key()
    netrc.write_text("nonsense\n")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_wandb_key()


def test_tensorboard_is_asked_for_where_it_is_installed(tmp_path, monkeypatch):
    there: set[str] = set()
    monkeypatch.setattr(loggers, "find_spec", lambda name: name in there or None)
    asked = configured(tmp_path, tensorboard=True)
    assert logger_problems(configured(tmp_path)) == []
    (problem,) = logger_problems(asked)
    assert "pip install 'unrope[tensorboard]'" in problem.message
    with pytest.raises(UserError, match="TensorBoard is not installed"):
        other_loggers(asked)
    for name in ("tensorboard", "tensorboardX"):
        there.clear()
        there.add(name)
        assert logger_problems(asked) == []
