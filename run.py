"""Run a benchmark from a checkout: `python run.py engine=skotergy devices=2`. Installed, the same is `skote-eval`."""

from skote.eval.command import main

if __name__ == "__main__":
    main()
