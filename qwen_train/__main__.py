"""`python -m qwen_train`, as torchrun starts it."""

from qwen_train.cli import main

if __name__ == "__main__":
    main()
