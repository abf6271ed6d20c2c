"""Where each change meets upstream's files: one module of data a change.

Where that would be long, it puts together what stands in modules named after it.

``CORE`` says which core file becomes which upstream file, ``EDITS`` are the call
sites, applied to the tree as the patches before it left it: those of the series, and,
for the change's patch alone, what the change requires.  See tools/patch_tree.py.
The test that goes upstream with it is patches/tests/test_<change>.py; what that imports
from ``mlx_vlm.tests`` comes with it, in the first patch of the series that needs it.
"""
