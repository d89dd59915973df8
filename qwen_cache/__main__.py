"""`python -m qwen_cache`, as the jobs of the UI are started."""

from qwen_cache.cli import main

if __name__ == "__main__":
    main()
