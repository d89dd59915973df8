"""How much GPU memory a run takes, which settings would fit, and what to do when it was too little."""
