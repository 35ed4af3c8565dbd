"""Trainers train the digits network for a moment, and their callbacks leave series,
events and a page, and the weights of a training that nobody watched."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featviz as fv
from featviz.errors import StoreError, UsageError
from featviz.rundir.read import read_run
from featviz.rundir.studies import read_steps
from featviz.rundir.verify import verify

from .training import SHOWN, digits, network, same

pytestmark = pytest.mark.slow


def check_series(out: Path, steps: list[int], layers: list[str]) -> None:
    """The series is whole, and its page has a slider over these steps and pictures of
    all."""
    runs = read_steps(out)
    assert list(runs) == steps
    assert not any(run["faults"] for run in verify(list(runs.values())))
    assert read_run(runs[steps[-1]]).record["layers"] == layers
    page = fv.report(out).page.read_text("utf-8")
    assert f'data-steps="{" ".join(map(str, steps))}"' in page
    # in front of the steps of a layer and an image stands the image
    pictures = (1 + len(steps)) * len(layers) * len(SHOWN)
    assert page.count('loading="lazy"') == pictures


def check_training(folder: Path, watched: nn.Module, alone: nn.Module) -> None:
    """Series, events and page are right, and the weights those of a training alone."""
    assert same([*watched.state_dict().values()], [*alone.state_dict().values()])
    check_series(folder / "s", [0, 2, 4], ["net.0", "net.3", "net.6"])
    reader = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = reader.EventAccumulator(str(folder / "tb")).Reload()
    pictures = events.Images("output/net.0/00-5.png")
    assert [event.step for event in pictures] == [0, 2, 4]


def callback(library: str, name: str, out: Path, **options: Any) -> Any:
    """One that draws every second step."""
    module = importlib.import_module(f"featviz.{library}")
    return getattr(module, name)(SHOWN, "Conv2d", 2, out, **options)


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
        checkpoint: Path | None = None,
        has_forward: bool = True,
    ) -> tuple[Any, Any]:
        """Train from a fixed seed; the trainer, and the module."""

        class Digits(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = network()

            def training_step(self, batch: list[Tensor], number: int) -> Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        if has_forward:
            Digits.forward = lambda self, x: self.net(x)
        data = torch.utils.data.TensorDataset(*digits())
        loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            enable_checkpointing=False,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Digits()
        torch.manual_seed(7)
        trainer.fit(module, loader, ckpt_path=checkpoint)
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
        series = tmp_path / "s"
        checkpoint = tmp_path / "three.ckpt"
        trainer, _ = self.fit(lightning, tmp_path, [self.watcher(series)], 3)
        trainer.save_checkpoint(checkpoint)
        self.fit(lightning, tmp_path, [self.watcher(series)], 6, checkpoint)
        check_series(series, [0, 2, 3, 4, 6], ["net.0", "net.3", "net.6"])
        with pytest.raises(StoreError, match="holds a series up to step 6"):
            self.fit(lightning, tmp_path, [self.watcher(series)])

    def test_a_training_that_fails(self, lightning: Any, tmp_path: Path) -> None:
        """Its error goes on to the caller, and its last step is not drawn."""

        class Failing(lightning.Callback):
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
        self.fit(lightning, tmp_path, [callback], has_forward=False)
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
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


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
        self, transformers: Any, folder: Path, callbacks: list[Any], steps: int = 4
    ) -> Classifier:
        """Train from a fixed seed, where accelerate runs forward under autocast."""
        pixels, labels = digits()
        rows = [
            {"pixel_values": x, "labels": y}
            for x, y in zip(pixels, labels, strict=True)
        ]
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=steps,
            per_device_train_batch_size=5,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
            logging_strategy="no",
            save_strategy="no",
            bf16=True,
        )
        model = Classifier()
        transformers.Trainer(
            model, arguments, train_dataset=rows, callbacks=callbacks
        ).train()
        return model

    watcher = staticmethod(partial(callback, "transformers", "TrainerWatcher"))

    def test_a_training(self, transformers: Any, tmp_path: Path) -> None:
        """Series, events and page are right, and the weights those of a training alone."""
        pytest.importorskip("tensorboard")
        callback = self.watcher(tmp_path / "s", tensorboard=tmp_path / "tb")
        watched = self.train(transformers, tmp_path, [callback])
        alone = self.train(transformers, tmp_path, [])
        check_training(tmp_path, watched, alone)

    def test_the_last_step_is_drawn(self, transformers: Any, tmp_path: Path) -> None:
        """Also where it is not due."""
        self.train(transformers, tmp_path, [self.watcher(tmp_path / "s")], steps=3)
        assert list(read_steps(tmp_path / "s")) == [0, 2, 3]

    def test_a_part_that_is_missing(self, transformers: Any, tmp_path: Path) -> None:
        """The hint names the first eight that there are."""
        callback = self.watcher(tmp_path / "s", part="nett")
        model = nn.Sequential(*(nn.Identity() for _ in range(10)))
        state = transformers.TrainerState()
        with pytest.raises(UsageError, match="'nett' is no module") as caught:
            callback.on_train_begin(None, state, None, model=model)
        assert caught.value.hint == "one of 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


@pytest.mark.parametrize(
    ("library", "extra"), [("lightning", "lightning"), ("transformers", "hf")]
)
def test_a_missing_library_is_named_with_the_remedy(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """featviz itself needs neither: the error names the extra."""
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"featviz.{library}", raising=False)
    message = rf"featviz\.{library} cannot be used.*featviz\[{extra}"
    with pytest.raises(ImportError, match=message):
        importlib.import_module(f"featviz.{library}")
