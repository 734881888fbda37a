"""`python -m trl_steady`, and what `accelerate launch -m trl_steady` runs."""

from trl_steady.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
