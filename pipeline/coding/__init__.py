"""From windows to the columns of blocks: read -> teach -> solve -> mend -> finish.

batch.py has what travels between the stages, stages.py the threads that they run in, lanes.py the streams of a GPU.
coder.py joins the stages, lsp.py and logits.py say what becomes of the hidden states (hidden.py). A stage only marks a
batch at which it fails; failures.py tries such a batch again. precision.py measures what a low precision changes.
"""
