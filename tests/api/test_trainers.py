"""Trainers train the digits network for a moment, and their callbacks leave series,
events and a page, and the weights of a training that nobody watched."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from featviz.errors import StoreError, UsageError
from featviz.options.commands import ReportOptions
from featviz.report import build_report
from featviz.rundir.read import read_run
from featviz.rundir.studies import read_steps
from featviz.rundir.verify import verify

from .training import SHOWN, digits, network, same

pytestmark = pytest.mark.slow


def _events(folder: Path, tag: str) -> list[int]:
    """The steps of a picture, by TensorBoard's own reader."""
    reader = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    read = reader.EventAccumulator(str(folder)).Reload()
    return [event.step for event in read.Images(tag)]


def check_series(out: Path, steps: list[int], layers: list[str]) -> None:
    """The series is whole, and its page has a slider over these steps and pictures of
    all."""
    found = read_steps(out)
    assert list(found) == steps
    assert not any(run["faults"] for run in verify(list(found.values())))
    assert all((path / "audit.json").is_file() for path in found.values())
    assert read_run(found[steps[-1]]).record["layers"] == layers
    page = build_report(out, ReportOptions()).page.read_text("utf-8")
    assert re.search(r'data-steps="([\d ]+)"', page)[1].split() == list(map(str, steps))  # type: ignore[index]
    assert page.count('loading="lazy"') == len(steps) * len(layers) * len(SHOWN)


def check_training(folder: Path, watched: nn.Module, alone: nn.Module) -> None:
    """Series, events and page are right, and the weights those of a training alone."""
    assert same([*watched.state_dict().values()], [*alone.state_dict().values()])
    check_series(folder / "s", [0, 2, 4], ["net.0", "net.3", "net.6"])
    assert _events(folder / "tb", "output/net.0/00-5.png") == [0, 2, 4]


def callback(library: str, name: str, out: Path, **options: Any) -> Any:
    """One that draws every second step."""
    found = importlib.import_module(f"featviz.{library}")
    return getattr(found, name)(SHOWN, "Conv2d", 2, out, **options)


class TestLightning:
    """`featviz.lightning.LightningWatcher`."""

    @pytest.fixture
    def lightning(self) -> Any:
        """Lightning, without its advice on this machine."""
        return pytest.importorskip(
            "lightning.pytorch", reason="lightning is not installed"
        )

    def fit(
        self,
        lightning: Any,
        folder: Path,
        callbacks: list[Any],
        steps: int = 4,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Train from a fixed seed; the trainer, and the module."""
        ckpt = options.pop("ckpt_path", None)
        forward = options.pop("forward", True)

        class Digits(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = network()

            def training_step(self, batch: list[Tensor], number: int) -> Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        if forward:
            Digits.forward = lambda self, x: self.net(x)
        data = torch.utils.data.TensorDataset(*digits())
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            enable_checkpointing=False,
            default_root_dir=folder,
            **quiet,
            **options,
        )
        module = Digits()
        torch.manual_seed(7)
        trainer.fit(module, loader, ckpt_path=ckpt)
        return trainer, module

    watcher = staticmethod(partial(callback, "lightning", "LightningWatcher"))

    def test_a_training(self, lightning: Any, tmp_path: Path) -> None:
        """Series, events and page are right, and the weights those of a training alone."""
        pytest.importorskip("tensorboard")
        callback = self.watcher(tmp_path / "s", tensorboard=tmp_path / "tb")
        _, watched = self.fit(lightning, tmp_path, [callback])
        _, alone = self.fit(lightning, tmp_path, [])
        check_training(tmp_path, watched, alone)

    def test_a_checkpoint_goes_on(self, lightning: Any, tmp_path: Path) -> None:
        """The first training ends with its last step, and the second one continues the
        series; one from 0 is refused."""
        trainer, _ = self.fit(lightning, tmp_path, [self.watcher(tmp_path / "s")], 3)
        trainer.save_checkpoint(tmp_path / "three.ckpt")
        again = {"ckpt_path": tmp_path / "three.ckpt"}
        self.fit(lightning, tmp_path, [self.watcher(tmp_path / "s")], 6, **again)
        check_series(tmp_path / "s", [0, 2, 3, 4, 6], ["net.0", "net.3", "net.6"])
        with pytest.raises(StoreError, match="holds a series up to step 6"):
            self.fit(lightning, tmp_path, [self.watcher(tmp_path / "s")])

    def test_a_training_that_fails(self, lightning: Any, tmp_path: Path) -> None:
        """Its error goes on to the caller, and its last step is not drawn."""

        class Failing(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
                if trainer.global_step == 3:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self.fit(lightning, tmp_path, [self.watcher(tmp_path / "s"), Failing()])
        assert list(read_steps(tmp_path / "s")) == [0, 2]

    def test_a_part(self, lightning: Any, tmp_path: Path) -> None:
        """A module without forward is watched by its part."""
        with pytest.raises(UsageError, match="part 'nett' is no module of Digits"):
            self.fit(lightning, tmp_path, [self.watcher(tmp_path / "s", part="nett")])
        callback = self.watcher(tmp_path / "s", part="net")
        self.fit(lightning, tmp_path, [callback], forward=False)
        check_series(tmp_path / "s", [0, 2, 4], ["0", "3", "6"])


class Classifier(nn.Module):
    """The digits network, as the Trainer of transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The scores, and the loss where there are labels."""
        logits = self.net(pixel_values)
        loss = (
            {}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels)}
        )
        return {**loss, "logits": logits}


class TestTransformers:
    """`featviz.transformers.TrainerWatcher`."""

    @pytest.fixture
    def transformers(self) -> Any:
        """transformers, with the accelerate that its Trainer needs."""
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        return pytest.importorskip(
            "transformers", reason="transformers is not installed"
        )

    def train(
        self, transformers: Any, folder: Path, callbacks: list[Any], **options: Any
    ) -> Classifier:
        """Train from a fixed seed."""
        pixels, labels = digits()
        rows = [
            {"pixel_values": x, "labels": y}
            for x, y in zip(pixels, labels, strict=True)
        ]
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=4,
            per_device_train_batch_size=5,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            logging_strategy="no",
            **{"save_strategy": "no", **options},
        )
        model = Classifier()
        transformers.Trainer(
            model, arguments, train_dataset=rows, callbacks=callbacks
        ).train()
        return model

    watcher = staticmethod(partial(callback, "transformers", "TrainerWatcher"))

    def test_a_training(self, transformers: Any, tmp_path: Path) -> None:
        """Series, events and page are right, and the weights those of a training alone,
        where accelerate runs forward under autocast."""
        pytest.importorskip("tensorboard")
        callback = self.watcher(tmp_path / "s", tensorboard=tmp_path / "tb")
        watched = self.train(transformers, tmp_path, [callback], bf16=True)
        alone = self.train(transformers, tmp_path, [], bf16=True)
        check_training(tmp_path, watched, alone)


@pytest.mark.parametrize(
    ("library", "extra"), [("lightning", "lightning"), ("transformers", "hf")]
)
def test_a_missing_library_is_said_with_the_remedy(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """featviz itself needs neither: the error names the extra."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"featviz.{library}", raising=False)
    with pytest.raises(
        ImportError, match=rf"featviz\.{library} cannot be used.*featviz\[{extra}"
    ):
        importlib.import_module(f"featviz.{library}")
