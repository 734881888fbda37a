import tempfile

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, labels):
        return {"loss": ((self.weight * x - labels) ** 2).mean(), "logits": self.weight * x}


class Evaluate(TrainerCallback):
    def on_step_end(self, *_, **__):
        trainer.evaluate()


data = [{"x": torch.tensor(1.0), "labels": torch.tensor(2.0)}] * 8
for callbacks in ([], [Evaluate()]):
    options = {"max_steps": 3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(tempfile.mkdtemp(), **options)
    trainer = Trainer(Line(), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    print(f"{len(callbacks)} callbacks: {sum('loss' in row for row in trainer.state.log_history)} rows with a loss")
