"""Entry point of `python -m trl_steady` and of `accelerate launch -m trl_steady`."""

from trl_steady.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
