"""`qwen-cache ui`: the work of the commands in a browser, for the folder of a project on this machine."""
