"""The web page: server.py (who may ask what), page.py (the Gradio Blocks), one file a tab.

Imports point inwards only: app.web reads the service and never torch, diffusers or transformers.
"""

import os

# Gradio reads it at import, so it has to be set before any module below this package imports gradio.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
