"""Where each change meets upstream's files: one module of data a change.

``CORE`` says which core file becomes which upstream file, ``EDITS`` are the call
sites, applied to the tree as the patches before it left it.  See tools/patch_tree.py.
``TEST_FIXTURES`` names further files of ``patches/tests`` that go upstream with its test.
"""
