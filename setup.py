"""Settings are in setup.cfg."""

from setuptools import setup

setup()
