"""JSON schemas made enforceable.

A schema is read as a calculus of atoms (`atoms`, `reading`): for each JSON type, an alternative of
conjunctions. Conjunctions merge into shapes (`shapes`), and shapes are written again as a schema of
few keywords (`writing`) whose meaning both backends share. What no shape can express stays
behind as a refusal that names its keyword; nothing is dropped.
"""
