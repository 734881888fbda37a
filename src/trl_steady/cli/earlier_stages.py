"""Leave out the stages of a script before the run in a dry run, such as SFT or the training of a reward model.

A dry run announces each of them, and leaves it out. If the script goes on with what such a stage would have saved, it
gets the model with which the stage began.
"""

import inspect
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import peft
import transformers
from peft.auto import _BaseAutoPeftModel
from peft.config import PeftConfigMixin
from transformers import PreTrainedModel, Trainer
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.trainer_utils import PredictionOutput, TrainOutput

from trl_steady.features.critic import construction
from trl_steady.features.reward_model import feature as reward_model
from trl_steady.trainers.base import SteadyTrainer
from trl_steady.trl_bridge.patching import replace

_LEFT_OUT = ("train", "evaluate", "predict", "save_model", "push_to_hub", "hyperparameter_search")
_TOKENIZERS: tuple[Any, ...] = (
    transformers.AutoTokenizer,
    transformers.AutoProcessor,
    transformers.PreTrainedTokenizerBase,
    transformers.ProcessorMixin,
)
_MODELS: tuple[Any, ...] = (
    transformers.AutoConfig,
    transformers.PreTrainedConfig,
    transformers.GenerationConfig,
    *_BaseAutoModelClass.__subclasses__(),  # each has a copy of the method
    PreTrainedModel,
    PeftConfigMixin,
    peft.PeftModel,
    _BaseAutoPeftModel,
)
_SAVE_ALONE: tuple[Any, ...] = (
    PreTrainedModel,
    peft.PeftModel,
    transformers.PreTrainedTokenizerBase,
    transformers.ProcessorMixin,
)
_FILES_OF_A_MODEL = ("config.json", "adapter_config.json")
_FILES_OF_A_TOKENIZER = ("tokenizer_config.json", "processor_config.json")


class Metrics(dict[str, float]):
    """The metrics of a stage that has not run: NaN, whatever a script asks for."""

    def __missing__(self, name: str) -> float:
        return float("nan")


class _Start(NamedTuple):
    """The model and tokenizer that take the place of those that a stage would have saved."""

    model: str
    """Its name or folder; "" if only a tokenizer would have been saved."""
    folder: Path
    """A temporary folder with the tokenizer."""


class EarlierStages:
    """Leaves out stages. `say` prints a line once, and `folder` is temporary."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._outputs = folder / "outputs"
        self._saved = folder / "starts"
        self._say = say
        self._starts: dict[Path, _Start] = {}  # folder in which a stage would have saved something
        self._has_left_out_training = False

    @contextmanager
    def left_out(self) -> Generator[None]:
        """Leave out every stage inside this context, also what follows it: `save_pretrained`, for example."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Trainer, "__init__", self._announcing(Trainer.__init__)))
            self._originals = {owner: owner.save_pretrained for owner in _SAVE_ALONE}
            for owner, save in self._originals.items():
                stack.enter_context(mock.patch.object(owner, "save_pretrained", self._saving(save)))
            for owners, files in ((_MODELS, _FILES_OF_A_MODEL), (_TOKENIZERS, _FILES_OF_A_TOKENIZER)):
                for owner in owners:
                    if "from_pretrained" not in vars(owner):
                        continue
                    read = self._reading(vars(owner)["from_pretrained"].__func__, files)
                    stack.enter_context(mock.patch.object(owner, "from_pretrained", classmethod(read)))
            for module in (construction, reward_model):
                read = self._reading(module.load_adapter, _FILES_OF_A_MODEL)
                stack.enter_context(mock.patch.object(module, "load_adapter", read))
            yield

    def _announcing(self, build: Callable[..., None]) -> Callable[..., None]:
        """Return transformers' constructor, after which the methods of a stage do nothing."""
        signature = inspect.signature(build)

        @wraps(build)
        def build_stage(trainer: Trainer, *arguments: Any, **keywords: Any) -> None:
            args = signature.bind(trainer, *arguments, **keywords).arguments.get("args")
            folders: list[str] = []
            is_earlier = not isinstance(trainer, SteadyTrainer)
            if is_earlier and args is not None:
                folders.append(args.output_dir)
                args.output_dir = str(self._outputs / str(len(self._starts)))
                folders.append(args.output_dir)
                args.report_to = []
                args.push_to_hub = False
            build(trainer, *arguments, **keywords)
            methods: dict[str, Callable[..., Any]] = {}
            for name in _LEFT_OUT:
                if is_earlier or name != "train":
                    methods[name] = partial(self._leave_out, trainer, name, getattr(trainer, name), folders)
            replace(trainer, methods)

        return build_stage

    def _leave_out(
        self,
        trainer: Any,
        name: str,
        method: Callable[..., Any],
        folders: list[str],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Say that a method of a trainer is left out, and return what it returns if there is nothing to do."""
        if trainer.is_in_train:  # the one step of our trainer
            return method(*arguments, **keywords)
        self._say(f"dry run: {type(trainer).__name__}.{name} is left out")
        if name == "train":
            self._has_left_out_training = True
            self._note_trainer(trainer, *folders)
            return TrainOutput(0, 0.0, Metrics(train_loss=float("nan")))
        if name == "save_model":
            given = arguments[0] if arguments else keywords.get("output_dir")
            self._note_trainer(trainer, given or trainer.args.output_dir)
        if name == "evaluate":
            return Metrics(eval_loss=float("nan"))
        if name == "predict":
            return PredictionOutput(cast(Any, None), None, Metrics(test_loss=float("nan")))
        return None

    def _note_trainer(self, trainer: Any, *folders: str) -> None:
        for folder in folders:
            self._note(folder, trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class)

    def _note(self, folder: str | os.PathLike[str], model: Any, tokenizer: Any) -> None:
        """Note that a stage would have saved a model and its tokenizer in a folder. Either of them may be None."""
        path = Path(folder).resolve()
        if Path.cwd().is_relative_to(path):  # any name on the hub could be one of its folders
            return
        start = self._starts.get(path)
        if start is None:
            start = _Start("", self._saved / str(len(self._starts)))
        if tokenizer is not None:
            self._save(tokenizer, start.folder)
        if model is not None:
            start = start._replace(model=self._model_of(model, start.folder))
        self._starts[path] = start

    def _model_of(self, model: Any, folder: Path) -> str:
        """Return the name of a model that can be loaded, or the folder to which it is saved if it has none."""
        is_adapter = isinstance(model, peft.PeftModel)
        has_new_head = "ForSequenceClassification" in type(model).__name__
        if is_adapter or has_new_head or not model.config.name_or_path:
            self._save(model, folder)
            return str(folder)
        return model.config.name_or_path

    def _save(self, thing: Any, folder: Path) -> None:
        for owner, save in self._originals.items():
            if isinstance(thing, owner):
                save(thing, folder)

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return `save_pretrained`, which writes nothing once a training has been left out."""

        @wraps(save)
        def save_or_note(thing: Any, save_directory: str | os.PathLike[str], *arguments: Any, **keywords: Any) -> Any:
            is_ours = Path(save_directory).is_relative_to(self._saved)
            if is_ours or not self._has_left_out_training:
                return save(thing, save_directory, *arguments, **keywords)
            self._say(f"dry run: {type(thing).__name__}.save_pretrained is left out")
            if isinstance(thing, PreTrainedModel | peft.PeftModel):
                self._note(save_directory, thing, None)
            else:
                self._note(save_directory, None, thing)
            return None

        return save_or_note

    def _reading(self, read: Callable[..., Any], files: tuple[str, ...]) -> Callable[..., Any]:
        """Return `from_pretrained`, which reads what a stage began with in place of what it would have saved."""

        @wraps(read)
        def read_start(*arguments: Any, **keywords: Any) -> Any:
            given = [self._start_of(argument, files) for argument in arguments]
            named = {name: self._start_of(argument, files) for name, argument in keywords.items()}
            return read(*given, **named)

        return read_start

    def _start_of(self, argument: Any, files: tuple[str, ...]) -> Any:
        """Return what to read in place of an argument: itself, if it is no folder of a stage, or is there already."""
        if not isinstance(argument, str | os.PathLike) or not self._starts:
            return argument
        path = Path(argument).resolve()
        if _has_any(path, files):
            return argument
        for folder, start in self._starts.items():
            if not path.is_relative_to(folder):
                continue
            source = start.model
            if files == _FILES_OF_A_TOKENIZER and _has_any(start.folder, files):
                source = str(start.folder)
            self._say(f"dry run: {argument} does not exist yet. The model with which its stage begins takes its place")
            return source or argument
        return argument


def _has_any(folder: Path, files: Iterable[str]) -> bool:
    return any((folder / file).is_file() for file in files)
