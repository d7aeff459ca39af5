"""Compiling a model's forward pass with torch.compile's backend, Inductor, in pieces between the layers that it calls.

``tracing`` writes the pass down as a graph in which each call of a linear layer, attention, or a mixture is one node.
``division`` cuts the graph there. The pieces between are torch operators alone, and hold no name of a layer: equal
layers share one piece. ``artefacts`` compiles a piece once, and keeps it in a folder. ``program`` runs pieces and
layers in order. ``compiled`` is the part of a model that does all this when its weights are loaded.
"""
