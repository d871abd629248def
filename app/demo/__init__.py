"""The built-in model: what it knows, how it is trained and how it is judged.

Importing this package (and ``app.demo.vocabulary``) never imports torch.
"""
