"""`python -m wicore_trt`: the `wicore` command, also in a checkout that was never installed."""

from wicore_trt.cli.main import main

if __name__ == "__main__":
    main()
