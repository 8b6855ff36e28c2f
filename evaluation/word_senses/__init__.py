"""The layer-choice diagnostic: how well do the LSPs of a layer tell word senses apart?"""
