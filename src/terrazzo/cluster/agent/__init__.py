"""What runs on a device over SSH: sent along with each connection, standard library only.

Nothing of this package is installed on the device. The starter sends these modules as text, so
both ends are always of one version, and a device needs no more than Python for being looked at.
"""
