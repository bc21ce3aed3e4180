"""The answer of several finished paths: the best path's, or a vote's. (family)"""
