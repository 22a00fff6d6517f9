"""SpeechBrain's Brain over sbkit's training loop: its hooks, its loaders, and its own loop for scripts.

The loop (``sbkit.train``) imports nothing of this package.
"""
