"""Images from a trained LoRA, with the stock pipelines. The only room that loads encoders and VAE."""
