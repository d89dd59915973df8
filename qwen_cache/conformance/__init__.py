"""Does a trainer compute what stock diffusers computes, one unpadded sample at a time? A suite for any trainer.

    pytest --pyargs qwen_cache.conformance --model-adapter my_trainer.adapters:forward
    pytest --pyargs qwen_cache.conformance --step-adapter my_trainer.adapters:step
    pytest --pyargs qwen_cache.conformance --loader-adapter my_trainer.adapters:batches
    pytest --pyargs qwen_cache.conformance --cache-adapter my_trainer.adapters:encode --encoders Qwen-Image-Edit-2511

A model adapter gets a stock transformer, tiny and with random weights, and returns a function of a batch
(`qwen_cache.conformance.model`); a step adapter gets the same, and returns noise, noise levels and losses of a batch
(`qwen_cache.conformance.step`). A loader adapter gets the folder of a small cache and returns its batches
(`qwen_cache.conformance.loader`). A cache adapter gets images and prompts, and returns the trainer's own latents and
embeddings (`qwen_cache.conformance.cache`), which are compared with stock diffusers if the encoders are given
(`qwen_cache.conformance.values`). The table at the end says which promises hold.
"""
