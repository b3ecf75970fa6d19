"""One adapter a family, in a file named after the model_type.

`MODELS` names models of the family, `spec` reads a config.json.
"""
