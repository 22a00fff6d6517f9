"""The last import of a server that forks: what was imported before is kept out of its children's garbage collections.

They would write to the pages that they share with the server, and so copy them.
"""

import gc

gc.freeze()
