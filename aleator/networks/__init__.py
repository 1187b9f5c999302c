"""Networks: adapters at the border, built-in ones as plain functions on plain trees."""

from aleator.networks._network import Network, UserNetwork, as_network
from aleator.networks.conv import VGG, LeNet5, LeNet5Caffe, ResNet
from aleator.networks.mlp import MLP, Shallow
from aleator.networks.partial import Partial
from aleator.networks.pruned import Pruned, PrunedSite
from aleator.networks.spectral import SpectralNorm

__all__ = [
    "MLP",
    "VGG",
    "LeNet5",
    "LeNet5Caffe",
    "Network",
    "Partial",
    "Pruned",
    "PrunedSite",
    "ResNet",
    "Shallow",
    "SpectralNorm",
    "UserNetwork",
    "as_network",
]
