import trl_steady  # noqa: F401, first, so that its filter of bitsandbytes' log is there
