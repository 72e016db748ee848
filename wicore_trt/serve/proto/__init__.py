"""The wire contract: `wicore/inference/v1/inference.proto` and the script that compiles it."""
