from collections import deque

table = {"completion": deque(maxlen=2), "extra": deque(maxlen=2)}  # GRPOTrainer._logs
for rollout, extra in (("first", ["of the first"] * 2), ("second", [])):  # the second rollout calls no log_extra
    table["completion"].extend([rollout] * 2)
    table["extra"].extend(extra)
print(table["completion"], table["extra"])
