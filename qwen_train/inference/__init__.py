"""Images from a trained LoRA, with the stock pipelines. The only folder of qwen_train that loads encoders and VAE."""
