"""The transformer of Qwen-Image-2.1 as it is trained: one sequence of text and images, and several noise draws."""
